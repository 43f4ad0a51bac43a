"""Figures of a run held against what the service promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.harness.results import Results, Spread


@dataclass(frozen=True, slots=True)
class Promise:
    """`measure` returns the figure of a run. It must be `needed` or better; `goal` is what we hope for."""

    text: str
    needed: float
    measure: Callable[[Results], Spread | None]
    goal: float | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise and its figure."""

    promise: Promise
    measured: Spread | None

    @property
    def kept(self) -> bool | None:
        """By the median of the rounds; None where a part of it was not measured."""
        if self.measured is None:
            return None
        median = self.measured.median
        return median <= self.promise.needed if self.promise.at_most else median >= self.promise.needed
