"""Load and requests of the last day, as this process has seen them, for operators without Prometheus."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

from serve_app.console.request_history import Latest, RequestHistory
from serve_app.contracts.books import Outcome
from serve_app.contracts.calls import repeat
from serve_app.contracts.operators import ListUncharged, SumService
from serve_app.contracts.periods import period_at
from serve_app.contracts.ports import BooksPort

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 60.0
RECENT: Final = 15  # samples
KEPT: Final = 24 * 60
Measure = Literal["pressure", "tokens_per_s"]


class Pressure:
    """Takes a sample once a minute. `seen` has the time and the load by backend of each sample, oldest first.

    `served` has each sample's time, and the number of requests on that day (UTC) until then.
    """

    def __init__(
        self,
        books: BooksPort,
        live: Callable[[], Awaitable[dict[str, Any]]],
        now: Callable[[], float],
        administer: Callable[..., Awaitable[dict[str, Any]]],
    ) -> None:
        self._books, self._live, self._now = books, live, now
        self.history = RequestHistory(administer, now)
        self.seen: deque[tuple[float, dict[str, Mapping[str, Any]]]] = deque(maxlen=KEPT)
        self.served: deque[tuple[float, int]] = deque(maxlen=KEPT)

    async def look(self) -> None:
        await self.history.look()
        found = await self._live()
        loads = {one["name"]: one["load"] for one in found["backends"]}
        kept: dict[str, Mapping[str, Any]] = {
            name: {"pressure": load["pressure"], "tokens_per_s": load["tokens_per_s"]}
            for name, load in loads.items()
            if load is not None
        }
        self.seen.append((self._now(), kept))
        self.served.append((self._now(), await self._requests()))

    async def recent(self) -> Latest | None:
        """Returns the requests of the last minutes, from the request log.

        While the log can't be read, returns those of about the last RECENT minutes in the ledger, or None before the
        first sample of the day.
        """
        await self.history.look()
        if self.history.latest is not None:
            return self.history.latest
        now = self._now()
        today = period_at("day", now).begins
        before = [one for one in [*self.served][-RECENT:] if today <= one[0] < now]
        if not before:
            return None
        at, number = before[0]
        uncharged = await self._books.run(ListUncharged())
        failed = sum(one.outcome is Outcome.FAILED and one.finished_at > at for one in uncharged)
        return Latest(max(0, await self._requests() - number), failed, (now - at) / 60)

    def rates(self) -> list[tuple[float, float]]:
        """Returns each sample's time and the requests per minute since the previous sample of the day, oldest first."""
        pairs = zip([*self.served], [*self.served][1:], strict=False)
        return [
            (ended, (last - first) * 60 / (ended - began))
            for (began, first), (ended, last) in pairs
            if ended > began and last >= first
        ]

    async def _requests(self) -> int:
        day = period_at("day", self._now()).name
        return sum(row.requests for row in (await self._books.run(SumService(day, day, 1))).days)

    async def run(self) -> None:
        """Runs until it is cancelled. Samples are missing while the service starts or is busy."""
        await repeat(self.look, EVERY_S, "the console could not read the pressure")

    def seen_of(self, measure: Measure) -> list[tuple[float, dict[str, float]]]:
        """Returns each sample's time and the value of `measure` by backend, oldest first."""
        return [(at, {name: load[measure] for name, load in loads.items()}) for at, loads in self.seen]


def clock(unix: float) -> str:
    """Returns the UTC time of day."""
    return time.strftime("%H:%M", time.gmtime(unix))
