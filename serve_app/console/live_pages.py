"""Current activity, for operators. The page refreshes its figures by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.pressure import KEPT, clock
from serve_app.console.request_history import HOUR_MINUTES, MINUTE_S, last_minutes
from serve_app.console.serving import serving
from serve_app.console.web import Visit
from serve_app.contracts.calls import Unavailable

CHARTED: Final = 144  # maximum points of a chart; each shows the highest of its samples, which are one a minute
ENOUGH: Final = 5  # minimum samples of a chart
DRAWN: Final = 6  # maximum lines of a chart; more would make it unreadable
DAY: Final = "day"


async def show(visit: Visit) -> Response:
    """Shows the page. The charts of load cover the last hour, or with `load=day` the last 24 hours."""
    pressure, now = visit.console.pressure, visit.console.now()
    recent, history = await pressure.recent(), pressure.history
    rates = [(at, {"All requests": rate}) for at, rate in pressure.rates()]
    try:
        live = await visit.console.live()
    except Unavailable:
        live = None
    span = DAY if visit.request.query_params.get("load") == DAY else ""
    axis = last_minutes(now, KEPT if span else HOUR_MINUTES)
    return visit.page(
        "operator_live.html",
        live=live,
        serving=serving(live),
        span=span,
        pressure_chart=_chart(axis, pressure.seen_of("pressure")),
        speed_chart=_chart(axis, pressure.seen_of("tokens_per_s")),
        hidden=max(0, len({name for at, loads in pressure.seen if at >= axis[0] for name in loads}) - DRAWN),
        requests_chart=history.requests_chart(clock) or _chart(last_minutes(now, HOUR_MINUTES), rates),
        first_token_chart=history.first_token_chart(clock),
        is_logged=bool(history.minutes()),
        recent=recent,
        speed=sum(one["load"]["tokens_per_s"] for one in (live or {}).get("backends", ()) if one["load"]),
    )


def _chart(minutes: Sequence[float], samples: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Any] | None:
    """Returns a line for each of the backends with the highest values; None with less than ENOUGH samples.

    `minutes` is the time axis. Samples before it are left out.
    """
    step = -(-len(minutes) // CHARTED)
    minutes = minutes[-int(minutes[0] // MINUTE_S) % step :]  # from a multiple of the step, such as 12:10
    shown = [(at, values) for at, values in samples if at >= minutes[0]]
    if len(shown) < ENOUGH:
        return None
    labels = [clock(at) for at in minutes[::step]]
    points: dict[str, list[float | None]] = {}
    for at, values in shown:
        place = min(len(labels) - 1, int((at - minutes[0]) // (step * MINUTE_S)))
        for name, value in values.items():
            line = points.setdefault(name, [None] * len(labels))
            before = line[place]
            line[place] = round(value if before is None else max(before, value), 3)
    highest = {name: max(value for value in line if value is not None) for name, line in points.items()}
    names = sorted(sorted(highest, key=lambda name: (-highest[name], name))[:DRAWN])
    first = int((shown[0][0] - minutes[0]) // (step * MINUTE_S))
    return {
        "labels": labels,
        "series": [{"name": name, "values": points[name]} for name in names],
        "type": "line",
        "empty": {"until": first, "text": f"Measured since {clock(shown[0][0])}"},
    }
