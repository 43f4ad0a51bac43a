"""Compares figures of a run with the promises of the service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.harness.results import Results, Spread


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise about one figure of a run.

    `measure` returns the figure. It must be at least `needed`; with `at_most`, at most `needed`. `goal` is a value that
    we would like to reach.
    """

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
        """Whether the median of the rounds keeps the promise; None if not measured."""
        if self.measured is None:
            return None
        median = self.measured.median
        return median <= self.promise.needed if self.promise.at_most else median >= self.promise.needed
