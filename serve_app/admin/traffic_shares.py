"""Computes weights that give one backend a share of the traffic. The others divide the rest as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TOTAL_WEIGHT: Final = 10_000  # sum of the weights, so shares are exact to a hundredth of a percent


class OnlyBackend(ValueError):
    """There is no other backend to take the rest of the traffic."""


def with_share(weights: Mapping[str, int], backend: str, percent: float) -> dict[str, int]:
    """Returns the new weights. `percent` is 0 to 100; 0 takes all traffic from the backend. Raises OnlyBackend."""
    share = min(TOTAL_WEIGHT, max(round(percent * TOTAL_WEIGHT / 100), 1)) if percent else 0
    others = {name: weight for name, weight in weights.items() if weight and name != backend}
    if share == TOTAL_WEIGHT:
        return {backend: 100}
    if not others:
        raise OnlyBackend(backend)
    shares = _divide(TOTAL_WEIGHT - share, others) | ({backend: share} if share else {})
    if all(weight % 100 == 0 for weight in shares.values()):
        shares = {name: weight // 100 for name, weight in shares.items()}  # whole percentages are easiest to read
    return {name: weight for name, weight in shares.items() if weight}


def _divide(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Divides `total` in these proportions, by largest remainders, in the order of `weights`."""
    given = sum(weights.values())
    parts = {name: total * weight // given for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: -(total * weights[name] % given))
    for name in by_remainder[: total - sum(parts.values())]:
        parts[name] += 1
    return parts
