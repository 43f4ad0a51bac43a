"""Backend load of the last day, as this process has seen it. It stands in for the boards without Prometheus."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

from serve_app.contracts.calls import repeat

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 60.0
KEPT: Final = 24 * 60
Measure = Literal["pressure", "tokens_per_s"]


class Pressure:
    """Samples the load once a minute. `seen` holds the time and the load by backend, oldest first."""

    def __init__(self, live: Callable[[], Awaitable[dict[str, Any]]], now: Callable[[], float]) -> None:
        self._live, self._now = live, now
        self.seen: deque[tuple[float, dict[str, Mapping[str, Any]]]] = deque(maxlen=KEPT)

    async def look(self) -> None:
        found = await self._live()
        loads = {one["name"]: one["load"] for one in found["backends"]}
        kept: dict[str, Mapping[str, Any]] = {
            name: {"pressure": load["pressure"], "tokens_per_s": load["tokens_per_s"]}
            for name, load in loads.items()
            if load is not None
        }
        self.seen.append((self._now(), kept))

    async def run(self) -> None:
        """Runs until it is cancelled. A starting or busy service leaves a gap."""
        await repeat(self.look, EVERY_S, "the console could not read the pressure")

    def seen_of(self, measure: Measure) -> list[tuple[float, dict[str, float]]]:
        """Returns each time with the backends' values, oldest first."""
        return [(at, {name: load[measure] for name, load in loads.items()}) for at, loads in self.seen]

    def series(self, measure: Measure) -> list[tuple[str, dict[str, float]]]:
        """As `seen_of`, with the clock in UTC as label."""
        return [(time.strftime("%H:%M", time.gmtime(at)), values) for at, values in self.seen_of(measure)]
