"""Detects an engine that hangs: it has requests, but its step does not end."""

from __future__ import annotations

import time
from collections.abc import Callable


class HangDetector:
    """Measures the running step. Loading, compiling and warming up do not count as steps.

    `limit_s` is the maximum duration of a step in seconds. `clock` returns seconds and never goes backwards. The engine
    reports its steps; another thread may call `problem`.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._began_at: float | None = None  # None: no step runs
        self._suspect: float | None = None  # `_began_at` of the step that the previous check found too long

    def step_begins(self) -> None:
        """Record that a step begins, or that one has ended and the next one begins."""
        self._began_at = self._clock()

    def step_ends(self) -> None:
        """Record that the step has ended and that no other step has begun."""
        self._began_at = None

    def problem(self) -> str | None:
        """Describe the hang if two consecutive checks have found the same step too long, else return None.

        One check is not enough: after a pause of the whole machine, the step may end right after the check.
        """
        began_at, suspect, self._suspect = self._began_at, self._suspect, None
        if began_at is None or (seconds := self._clock() - began_at) <= self._limit_s:
            return None
        self._suspect = began_at
        if suspect != began_at:
            return None
        return f"a step has not ended for {seconds:.0f} s, and step_timeout_s is {self._limit_s:g} s"
