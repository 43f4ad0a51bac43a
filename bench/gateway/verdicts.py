"""Holds what was measured against what the service promises of the path around the model."""

from __future__ import annotations

from collections.abc import Callable

from bench.engine.figures import Spread, ratios
from bench.engine.results import Results, rounds
from bench.engine.verdicts import Promise, Verdict
from bench.gateway.session import WORKLOAD
from bench.gateway.systems import BARE, FULL, LITELLM


def against(other: str, figure: str, clients: int) -> Callable[[Results], Spread | None]:
    """The full path's figure over the other's, round by round."""

    def measure(results: Results) -> Spread | None:
        ours = rounds(results, FULL, WORKLOAD, clients, figure)
        theirs = rounds(results, other, WORKLOAD, clients, figure)
        both = sorted(ours.keys() & theirs.keys())
        return ratios([ours[number] for number in both], [theirs[number] for number in both])

    return measure


PROMISES = (
    *(
        Promise(
            f"requests/s at {clients} clients, against the LiteLLM proxy",
            1.3,
            against(LITELLM, "requests_per_s", clients),
            goal=2.0,
        )
        for clients in (16, 64)
    ),
    Promise("p50 at 1 client, against the LiteLLM proxy", 1.0, against(LITELLM, "p50_ms", 1), goal=0.7, at_most=True),
    *(
        Promise(
            f"requests/s at {clients} clients, against the bare path", 0.55, against(BARE, "requests_per_s", clients)
        )
        for clients in (16, 64)
    ),
)


def verdicts(results: Results) -> list[Verdict]:
    """All promises, in the order of the table."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]
