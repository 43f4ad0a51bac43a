"""Schedule of what is killed and when. It is decided before the run from a seed, so it can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

KINDS = ("gateway", "limiter", "accounting", "model", "database")
FIRST_S = 3.0  # load comes first
GAP_S = 4.0  # mean
MIN_GAP_S = 0.5
TOGETHER = 0.2  # of the kills come in the same moment as the one before
MAX_DOWN_S = 4.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL."""

    at_s: float  # after the load has begun
    kind: str
    pick: float  # in [0, 1): which one of the processes of that kind
    down_s: float  # until the database is started again; Serve restarts the others itself


def plan(seed: int, seconds: float, kinds: Sequence[str] = KINDS) -> list[Kill]:
    """Kills within `seconds`, in their order. Every kind comes once before any comes again."""
    rng = Random(seed)
    kills: list[Kill] = []
    at = FIRST_S
    for kind in _in_rounds(rng, kinds):
        if at >= seconds:
            return kills
        kills.append(Kill(at, kind, rng.random(), rng.uniform(0.2, MAX_DOWN_S)))
        if rng.random() >= TOGETHER:
            at += MIN_GAP_S + rng.expovariate(1 / (GAP_S - MIN_GAP_S))
    raise AssertionError("rounds never end")


def _in_rounds(rng: Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(kinds, len(kinds))
