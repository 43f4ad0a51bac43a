"""Backend pressure of the last day, as this process has seen it. It stands in for the boards without Prometheus."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from serve_app.contracts.calls import repeat

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 60.0
KEPT: Final = 24 * 60


class Pressure:
    """Samples the pressure once a minute. `seen` holds the time and the pressure by backend, oldest first."""

    def __init__(self, live: Callable[[], Awaitable[dict[str, Any]]], now: Callable[[], float]) -> None:
        self._live, self._now = live, now
        self.seen: deque[tuple[float, dict[str, float]]] = deque(maxlen=KEPT)

    async def look(self) -> None:
        found = await self._live()
        loads = {one["name"]: one["load"] for one in found["backends"]}
        self.seen.append((self._now(), {name: load["pressure"] for name, load in loads.items() if load is not None}))

    async def run(self) -> None:
        """Runs until it is cancelled. A starting or busy service leaves a gap."""
        await repeat(self.look, EVERY_S, "the console could not read the pressure")

    def by_hour(self) -> list[tuple[float, dict[str, float]]]:
        """Returns the start of each hour and each backend's maximum pressure in it, newest first."""
        hours: dict[float, dict[str, float]] = {}
        for at, pressures in self.seen:
            most = hours.setdefault(at // 3600 * 3600, {})
            for name, pressure in pressures.items():
                most[name] = max(pressure, most.get(name, 0.0))
        return sorted(hours.items(), reverse=True)
