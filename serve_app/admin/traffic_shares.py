"""Weights that give one backend a share of the traffic, and the others the rest, in the proportions that they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WHOLE: Final = 10_000  # weights of this sum give shares to a hundredth of a percent


class OnlyBackend(ValueError):
    """No other backend would get the rest."""


def with_share(weights: Mapping[str, int], backend: str, percent: float) -> dict[str, int]:
    """`percent` is 0 to 100; 0 takes all traffic from it. Raises OnlyBackend."""
    share = min(WHOLE, max(round(percent * WHOLE / 100), 1)) if percent else 0
    others = {name: weight for name, weight in weights.items() if weight and name != backend}
    if share == WHOLE:
        return {backend: 100}
    if not others:
        raise OnlyBackend(backend)
    shares = _divide(WHOLE - share, others) | ({backend: share} if share else {})
    if all(weight % 100 == 0 for weight in shares.values()):
        shares = {name: weight // 100 for name, weight in shares.items()}  # whole percents read best
    return {name: weight for name, weight in shares.items() if weight}


def _divide(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """`total` in these proportions, by largest remainders, in the order of `weights`."""
    whole = sum(weights.values())
    parts = {name: total * weight // whole for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: -(total * weights[name] % whole))
    for name in by_remainder[: total - sum(parts.values())]:
        parts[name] += 1
    return parts
