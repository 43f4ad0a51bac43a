"""Current activity, for operators. The page refreshes its figures by itself."""

from __future__ import annotations

from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.pressure import clock
from serve_app.console.serving import serving
from serve_app.console.web import Visit
from serve_app.contracts.calls import Unavailable

CHARTED: Final = 180  # maximum points of a chart; each shows the highest of its samples, which are one a minute
ENOUGH: Final = 5  # minimum points of a chart
DRAWN: Final = 6  # maximum lines of a chart; more would make it unreadable


async def show(visit: Visit) -> Response:
    pressure = visit.console.pressure
    recent, history = await pressure.recent(), pressure.history
    rates = [(clock(at), {"All requests": rate}) for at, rate in pressure.rates()]
    try:
        live = await visit.console.live()
    except Unavailable:
        live = None
    return visit.page(
        "operator_live.html",
        live=live,
        serving=serving(live),
        pressure_chart=_chart(pressure.series("pressure")),
        speed_chart=_chart(pressure.series("tokens_per_s")),
        first_seen=pressure.seen[0][0] if pressure.seen else None,
        hidden=max(0, len({name for _, loads in pressure.seen for name in loads}) - DRAWN),
        requests_chart=history.requests_chart(clock) or _chart(rates),
        first_token_chart=history.first_token_chart(clock),
        is_logged=bool(history.minutes()),
        recent=recent,
        speed=sum(one["load"]["tokens_per_s"] for one in (live or {}).get("backends", ()) if one["load"]),
    )


def _chart(points: list[tuple[str, dict[str, float]]]) -> dict[str, Any] | None:
    """Returns a line for each of the backends with the highest values; None before there are ENOUGH points."""
    if len(points) < ENOUGH:
        return None
    step = -(-len(points) // CHARTED)
    groups = [points[start : start + step] for start in range(0, len(points), step)]
    highest: dict[str, float] = {}
    for _, values in points:
        for name, value in values.items():
            highest[name] = max(value, highest.get(name, value))
    names = sorted(sorted(highest, key=lambda name: (-highest[name], name))[:DRAWN])
    series = [
        {"name": name, "values": [_most(values.get(name) for _, values in group) for group in groups]} for name in names
    ]
    return {"labels": [group[0][0] for group in groups], "series": series, "type": "line"}


def _most(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 3) if known else None
