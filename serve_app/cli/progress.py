"""One line on standard error for what takes long, so that nobody wonders whether it hangs. The clock is handed in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0  # what is done by then needs no line
ON_TERMINAL_S = 0.5
ELSEWHERE_S = 10.0  # a log needs fewer


class Progress:
    """Counts, and says so from time to time: over the same line on a terminal, line by line elsewhere."""

    def __init__(
        self, stream: TextIO, what: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._what = what
        self._clock = clock
        self._on_terminal = stream.isatty()
        self._next = math.inf if quiet else clock() + PATIENCE_S
        self._shown = False
        self.count = 0

    def add(self, count: int) -> None:
        """So many more are done."""
        self.count += count
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (ON_TERMINAL_S if self._on_terminal else ELSEWHERE_S)
        line = f"{self.count:,} {self._what} …"
        self._stream.write(f"\r{line}" if self._on_terminal else f"{line}\n")
        self._stream.flush()
        self._shown = True

    def close(self) -> None:
        """Leaves the terminal's line free for what comes next."""
        if self._shown and self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
