"""Limits how often an account gets stored replies. They are not billed, and each is read from the ledger.

Each gateway counts separately, as it does queries.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from serve_app.api import errors
from serve_app.contracts.rates import Bucket

PER_MINUTE: Final = 300
MAX_ACCOUNTS: Final = 10_000  # about 2 MB; the least recently counted is evicted first


class Replays:
    """Counts the stored replies by account. `clock` returns seconds and never runs backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, account_id: str) -> None:
        """Raises ApiError (429) while the account is over its rate. Call it before the ledger is read."""
        bucket = self._buckets.get(account_id)
        if bucket is not None and (wait_s := bucket.wait_s(self._clock(), 1)):
            message = (
                f"Stored replies per minute of this account: the limit is {PER_MINUTE}. "
                f"Try again in {wait_s:.3g} s with the same idempotency-key."
            )
            raise errors.rate_limit(message, code="requests", retry_after_s=wait_s)

    def count(self, account_id: str) -> None:
        """Counts one stored reply."""
        bucket = self._buckets.setdefault(account_id, Bucket(PER_MINUTE))
        bucket.charge(self._clock(), 1)
        self._buckets.move_to_end(account_id)
        if len(self._buckets) > MAX_ACCOUNTS:
            self._buckets.popitem(last=False)
