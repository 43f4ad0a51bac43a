"""Promises of the service for the path around the model, as ratios within one run."""

from __future__ import annotations

from collections.abc import Callable

from bench.gateway.session import WORKLOAD
from bench.gateway.systems import BARE, FULL, LITELLM
from bench.harness.promises import Promise, Verdict
from bench.harness.results import Results, Spread, ratio


def against(other: str, figure: str, clients: int) -> Callable[[Results], Spread | None]:
    """Ratio of the service's figure to the other system's."""
    return lambda results: ratio(results, FULL, other, WORKLOAD, clients, figure)


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
            f"requests/s at {clients} clients, against the bare path",
            0.55,
            against(BARE, "requests_per_s", clients),
            goal=0.8,
        )
        for clients in (16, 64)
    ),
)


def verdicts(results: Results) -> list[Verdict]:
    """All promises, in the order of the table."""
    return [Verdict(promise, promise.measure(results)) for promise in PROMISES]
