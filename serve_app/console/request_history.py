"""Requests per minute of the last hour and their time to the first token, from the request log of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.units import HOUR_S

MINUTE_S: Final = 60.0
FRESH_S: Final = 10.0  # a page reads the log again after this time
PATIENCE_S: Final = 2.0  # maximum wait of a page for the log
HOUR_MINUTES: Final = 60
UNSURE_S: Final = 300.0  # each read goes back this far: requests are logged at their end, so recent counts grow
KINDS: Final = {
    "completed": "Completed",
    "rejected": "Rejected (4xx)",
    "failed": "Failed (5xx)",
    "cancelled": "Cancelled",
}


@dataclass(frozen=True, slots=True)
class Latest:
    """Requests of the last `minutes` minutes. `requests` does not include `rejected`, which is None if not known."""

    requests: int
    failed: int
    minutes: float
    rejected: int | None = None
    first_token_ms: Mapping[str, float] | None = None  # p50 and p95; None without a completed request


class RequestHistory:
    """Asks a gateway for the minutes that are not known yet, and keeps those of the last hour.

    `latest` is None while the log can't be read.
    """

    def __init__(self, ask: Callable[..., Any], now: Callable[[], float]) -> None:
        self._ask, self._now = ask, now
        self._minutes: dict[float, Mapping[str, Any]] = {}
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()
        self.latest: Latest | None = None

    async def look(self) -> None:
        """Brings the history up to date, unless that was done a moment ago. Waits at most PATIENCE_S."""
        async with self._asking:
            now = self._now()
            if self._asked_at is not None and 0 <= now - self._asked_at < FRESH_S:
                return
            self._asked_at = now
            known = max(self._minutes, default=now - HOUR_S)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    found = await self._ask("minutes", {"since": max(now - HOUR_S, known - UNSURE_S)}, None)
            except (Unavailable, TimeoutError, KeyError):  # KeyError: a gateway of the previous release
                found = {"refused": True}
            if "refused" in found:
                self.latest = None
                return
            self._minutes |= {one["at"]: one for one in found["minutes"]}
            for at in [at for at in self._minutes if at < now - HOUR_S - MINUTE_S]:
                del self._minutes[at]
            one = found["latest"]
            requests = sum(one[kind] for kind in KINDS if kind != "rejected")
            self.latest = Latest(requests, one["failed"], one["seconds"] / 60, one["rejected"], one["first_token_ms"])

    def minutes(self) -> list[tuple[float, Mapping[str, Any] | None]]:
        """Returns each minute of the last hour with its figures; None: not known. Empty if no minute is known."""
        found = [(at, self._minutes.get(at)) for at in last_minutes(self._now(), HOUR_MINUTES)]
        return found if any(one is not None for _, one in found) else []

    def requests_chart(self, clock: Callable[[float], str]) -> dict[str, Any] | None:
        """Returns the requests of each minute by outcome; None before anything is known."""
        minutes = self.minutes()
        series = [
            {"name": name, "values": [None if one is None else one[kind] for _, one in minutes]}
            for kind, name in KINDS.items()
        ]
        shown = [one for one in series if one["name"] == KINDS["completed"] or any(one["values"])]
        return _chart(minutes, shown, clock, "No requests", type="bar", stacked=True)

    def first_token_chart(self, clock: Callable[[float], str]) -> dict[str, Any] | None:
        """Returns the median and the 95th percentile of the time to the first token; None before anything is known."""
        minutes = self.minutes()
        times = [(one or {}).get("first_token_ms") or {} for _, one in minutes]
        series = [{"name": cut, "values": [one.get(cut) for one in times]} for cut in ("p50", "p95")]
        return _chart(minutes, series if any(times) else [], clock, "No completed requests", type="line", unit="ms")


def last_minutes(now: float, count: int) -> list[float]:
    """Returns the times at which the last `count` minutes began, oldest first. It is the time axis of all charts."""
    last = int(now // MINUTE_S)
    return [minute * MINUTE_S for minute in range(last - count + 1, last + 1)]


def _chart(
    minutes: Sequence[tuple[float, Any]],
    series: list[dict[str, Any]],
    clock: Callable[[float], str],
    nothing: str,
    **more: Any,
) -> dict[str, Any] | None:
    """Returns a chart. Its `empty` says why the part before the first bar, or point, is empty."""
    if not minutes or not series:
        return None
    labels = [clock(at) for at, _ in minutes]
    known = next(place for place, (_, one) in enumerate(minutes) if one is not None)
    begins = next((place for place in range(len(labels)) if any(one["values"][place] for one in series)), None)
    if begins is None:
        more["empty"] = {"until": len(labels), "text": f"{nothing} in the last hour"}
    elif 2 * known > begins:
        more["empty"] = {"until": known, "text": f"Log begins {labels[known]}"}
    elif begins:
        more["empty"] = {"until": begins, "text": f"{nothing} in this log before {labels[begins]}"}
    return {"labels": labels, "series": series, **more}
