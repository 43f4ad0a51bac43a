"""How far a long load has come: lines for a person, not too many of them."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]  # receives one line at a time, for a log or a terminal


class Progress:
    """Says `what: 40 %` each ten percent, but not more often than each second, and after ten silent seconds anyway.

    What is done within the first second is never mentioned. `total` is of any unit, above 0; `clock` gives seconds.
    """

    def __init__(self, say: Say, what: str, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._what = what
        self._total = max(total, 1e-9)
        self._clock = clock
        self._said_at = clock()
        self._said = 0  # percent, in the last line

    def at(self, done: float, total: float | None = None) -> None:
        """Note that `done` of the total (of a new one if it has grown) is done; the end is the caller's to announce."""
        if total is not None:
            self._total = max(total, 1e-9)
        now, percent = self._clock(), min(int(100 * done / self._total), 100)
        silent = now - self._said_at
        if percent < 100 and (silent >= 10.0 or (silent >= 1.0 and percent - self._said >= 10)):
            self._say(f"{self._what}: {percent} %")
            self._said_at, self._said = now, percent
