"""Counts the work in a fair queue, leaving out work that delays only the account that queued it."""

from __future__ import annotations

from collections.abc import Collection


def count_fairly(amounts: Collection[int], least: float) -> float:
    """Returns the sum of the accounts' amounts, each capped at the larger of `least` and twice the mean of the others.

    In a fair queue, work that an account queues beyond this cap delays only its own requests.
    """
    total, others = sum(amounts), max(1, len(amounts) - 1)
    return sum(min(amount, max(least, 2 * (total - amount) // others)) for amount in amounts)
