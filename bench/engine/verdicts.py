"""Holds what was measured against what the engine promises: a ratio of one run each, and whether it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.engine.figures import Spread, ratios
from bench.engine.plan import CODE, DISTURBED, OURS, PLAIN, PREFIX, SHORT
from bench.engine.results import Results, rounds, spread


@dataclass(frozen=True, slots=True)
class Promise:
    """`measure` gives the figure of a run; it must be `needed` or better, `goal` is what is hoped for."""

    text: str
    needed: float
    measure: Callable[[Results], Spread | None]
    goal: float | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise and what was measured; `kept` is None where a part of it was not measured."""

    promise: Promise
    measured: Spread | None

    @property
    def kept(self) -> bool | None:
        """By the median of the rounds."""
        if self.measured is None:
            return None
        median = self.measured.median
        return median <= self.promise.needed if self.promise.at_most else median >= self.promise.needed


def rate_against(peer: str, workload: str, clients: int) -> Callable[[Results], Spread | None]:
    """Our output tokens per second over the peer's."""

    def measure(results: Results) -> Spread | None:
        ours = rounds(results, OURS, workload, clients, "tokens_per_s")
        theirs = rounds(results, peer, workload, clients, "tokens_per_s")
        both = sorted(ours.keys() & theirs.keys())
        return ratios([ours[number] for number in both], [theirs[number] for number in both])

    return measure


def own(workload: str, clients: int, figure: str) -> Callable[[Results], Spread | None]:
    """A figure of ours that is a ratio already."""
    return lambda results: spread(results, OURS, workload, clients, figure)


PROMISES = (
    Promise("1 client, against `transformers serve`", 3.0, rate_against("transformers", SHORT, 1), goal=5.0),
    Promise(
        "16 clients, against `transformers serve --continuous-batching`",
        4.0,
        rate_against("transformers-cb", SHORT, 16),
        goal=6.0,
    ),
    Promise("1 client, against vLLM's CPU build", 2.0, rate_against("vllm", SHORT, 1)),
    Promise("16 clients, against vLLM's CPU build", 3.0, rate_against("vllm", SHORT, 16)),
    Promise("1 client, against llama.cpp's server", 0.5, rate_against("llama-cpp", SHORT, 1), goal=1.0),
    Promise("4 clients, against llama.cpp's server", 1.2, rate_against("llama-cpp", SHORT, 4)),
    Promise("16 clients, against llama.cpp's server", 1.8, rate_against("llama-cpp", SHORT, 16)),
    Promise("1 client that edits code, with speculation against without", 1.8, rate_against(PLAIN, CODE, 1)),
    Promise("1 client, nothing repeats, with speculation against without", 0.95, rate_against(PLAIN, SHORT, 1)),
    Promise(
        "time to first token of a second turn over 1,000 tokens, against the first turn's",
        0.2,
        own(PREFIX, 1, "second_to_first"),
        at_most=True,
    ),
    Promise("speed that 4 streams keep while 6,000 tokens are prefilled", 1 / 3, own(DISTURBED, 4, "kept")),
)


def verdicts(results: Results) -> list[Verdict]:
    """All promises, in the order of the table."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]
