"""What counts of the accounts' queued work where each of them has its turn."""

from __future__ import annotations

from collections.abc import Collection


def count_fairly(amounts: Collection[int], least: float) -> float:
    """The sum of the accounts' amounts, each up to twice the mean of the others', or up to `least`.

    In a fair queue, what one account has queued beyond that delays only its own requests.
    """
    whole, others = sum(amounts), max(1, len(amounts) - 1)
    return sum(min(amount, max(least, 2 * (whole - amount) // others)) for amount in amounts)
