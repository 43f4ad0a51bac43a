"""The figures of one measurement of a router: cached prompts, waits, load of the replicas, fairness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.harness.results import percentile


@dataclass(frozen=True, slots=True)
class Sent:
    """One completed request of a conversation."""

    account: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first token of one account's request, while another account has 2 or 50 requests open.

    One value per repetition.
    """

    beside_two: tuple[float, ...]
    beside_flood: tuple[float, ...]


def summary(requests: Sequence[Sent], waits: Waits, replicas: int) -> dict[str, Any]:
    """Returns the figures of one measurement, for JSON."""
    prompts = sum(one.prompt_tokens for one in requests)
    cached = sum(one.cached_tokens for one in requests)
    first = [one.first_token_s for one in requests]
    sent: Counter[str] = Counter()
    computed: Counter[str] = Counter()
    for one in requests:
        sent[one.replica] += 1
        computed[one.replica] += one.prompt_tokens - one.cached_tokens
    two, flood = median(waits.beside_two), median(waits.beside_flood)
    return {
        "requests": len(requests),
        "prompt_tokens": prompts,
        "cached_share": cached / prompts if prompts else 0.0,
        "ttft_p50_s": percentile(first, 0.5),
        "ttft_p95_s": percentile(first, 0.95),
        # Figures of the busiest replica, as multiples of an even share.
        "most_requests": _over_even(sent, replicas),
        "most_computed": _over_even(computed, replicas),
        "beside_two_s": two,
        "beside_flood_s": flood,
        "fairness": flood / two,
    }


def _over_even(counts: Counter[str], replicas: int) -> float:
    total = sum(counts.values())
    return max(counts.values(), default=0) * replicas / total if total else 0.0
