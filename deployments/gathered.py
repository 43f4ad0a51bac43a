"""What is counted between two flushes, summed up: most calls to Ray's metrics then cost a look-up in a dictionary.

A call into Ray's metrics takes a lock that its exporter holds now and then, in the middle of a request. Nothing is
billed from metrics, so losing the last half a second with a process is no harm.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, Final, Protocol

FLUSH_S: Final = 0.5

Tags = tuple[tuple[str, str], ...]


class Counter(Protocol):
    """Ray's counter."""

    def inc(self, value: float = 1.0, tags: Any = None) -> None:
        """Adds `value`, which must be above 0."""


class Histogram(Protocol):
    """Ray's histogram, which takes one value at a time."""

    def observe(self, value: float, tags: Any = None) -> None:
        """Counts `value` in its bucket."""


class Gathered:
    """Passes counts on every `FLUSH_S` seconds. Belongs to one event loop; what comes before one runs waits for it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Counter, Tags], float] = {}
        self._values: dict[tuple[Histogram, Tags], list[float]] = {}
        self._is_due = False

    def inc(self, counter: Counter, value: float, *tags: tuple[str, str]) -> None:
        """Adds to a counter."""
        key = counter, tags
        self._counts[key] = self._counts.get(key, 0) + value
        if not self._is_due:
            self._schedule()

    def observe(self, histogram: Histogram, value: float, *tags: tuple[str, str]) -> None:
        """Adds a value to a histogram."""
        key = histogram, tags
        values = self._values.get(key)
        if values is None:
            values = self._values[key] = []
        values.append(value)
        if not self._is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_later(FLUSH_S, self.flush, context=contextvars.Context())

    def flush(self) -> None:
        """Passes on what has been gathered, now."""
        counts, self._counts = self._counts, {}
        values, self._values = self._values, {}
        self._is_due = False
        for (counter, tags), value in counts.items():
            counter.inc(value, dict(tags))
        for (histogram, of), observed in values.items():
            for one in observed:
                histogram.observe(one, dict(of))
