"""How often a key may ask for models, balance, usage and its account: the look-ups share the ledger's readers.

Each gateway counts for itself, so with several gateways a key may ask more often, by their number. That is enough: the
bound protects each gateway and keeps any one key from filling the ledger's pool, and it costs no message.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from serve_app.api import errors
from serve_app.contracts.limiting import Identity, Window
from serve_app.contracts.rates import Bucket
from serve_app.gateway.web import duration

KEYS_OF_AN_ACCOUNT: Final = 4  # that may use their whole rate at once
MAX_BUCKETS: Final = 20_000  # about 4 MB; the longest unused is forgotten first


class QueryRates:
    """Buckets of keys and accounts. Does no I/O. `per_minute` is of one key and may be set at any time.

    `clock` gives seconds and never runs backwards.
    """

    def __init__(
        self, per_minute: int = 60, clock: Callable[[], float] = time.monotonic, most_buckets: int = MAX_BUCKETS
    ) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._most_buckets = most_buckets
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def count(self, identity: Identity) -> None:
        """Counts one query. Raises ApiError (429), and counts nothing, if key or account has no room for it."""
        now = self._clock()
        of_key = self._bucket(f"key {identity.key_id}", self.per_minute)
        of_account = self._bucket(f"account {identity.account_id}", KEYS_OF_AN_ACCOUNT * self.per_minute)
        for bucket, whose in ((of_key, "this key"), (of_account, "this account")):
            if wait_s := bucket.wait_s(now, 1):
                raise _over_rate(whose, Window(*bucket.state(now)[1::-1], bucket.reset_s(now)), wait_s)
        of_key.charge(now, 1)
        of_account.charge(now, 1)

    def charge(self, identity: Identity, queries: int) -> None:
        """Counts what a query's answer costs beyond one query. The next ones wait for it."""
        now = self._clock()
        self._bucket(f"key {identity.key_id}", self.per_minute).charge(now, queries)
        self._bucket(f"account {identity.account_id}", KEYS_OF_AN_ACCOUNT * self.per_minute).charge(now, queries)

    def _bucket(self, name: str, limit: int) -> Bucket:
        bucket = self._buckets.setdefault(name, Bucket(limit))
        bucket.limit = limit
        self._buckets.move_to_end(name)
        while len(self._buckets) > self._most_buckets:
            self._buckets.popitem(last=False)
        return bucket


def _over_rate(whose: str, window: Window, wait_s: float) -> errors.ApiError:
    message = (
        f"Queries per minute of {whose}: the limit is {window.limit} for /models, /user and /account together. "
        f"Try again in {wait_s:.3g} s. Chat requests are not counted here."
    )
    headers = {
        "x-ratelimit-limit-requests": str(window.limit),
        "x-ratelimit-remaining-requests": str(window.remaining),
        "x-ratelimit-reset-requests": duration(window.reset_s),
    }
    return errors.rate_limit(message, code="requests", retry_after_s=wait_s, headers=headers)
