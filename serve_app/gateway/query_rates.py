"""Limits how often a key may query models, balance, usage and its account. These queries share the ledger's readers.

Requests that tokenize have limits of the same kind (`token_endpoint.py`).

Only AT_ONCE queries of an account run at the same time, so that a burst does not delay other accounts' requests. Each
gateway counts separately, so a key may send N times as many queries to N gateways. This still protects each gateway,
and keeps a single key from occupying all of the ledger's readers.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from serve_app.api import errors
from serve_app.contracts.limiting import Identity, Window
from serve_app.contracts.rates import Bucket
from serve_app.gateway.web import duration

KEYS_OF_AN_ACCOUNT: Final = 4  # limit of an account, as a multiple of a key's limit
AT_ONCE: Final = 2  # running queries of an account; further ones wait
MAX_BUCKETS: Final = 20_000  # about 4 MB; the least recently used bucket is evicted first


class QueryRates:
    """Buckets of keys and accounts. Does no I/O. `per_minute` is the limit of one key and may change at any time.

    `of` names the counted requests in error messages. `clock` returns seconds and never runs backwards.
    """

    def __init__(
        self,
        per_minute: int = 60,
        clock: Callable[[], float] = time.monotonic,
        most_buckets: int = MAX_BUCKETS,
        of: str = "/models, /user and /account together",
    ) -> None:
        self.per_minute = per_minute
        self._of = of
        self._clock = clock
        self._most_buckets = most_buckets
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def place(self, identity: Identity) -> asyncio.Semaphore:
        """Returns the account's semaphore. Each query holds it while it runs."""
        return self._places.setdefault(identity.account_id, asyncio.Semaphore(AT_ONCE))

    def count(self, identity: Identity) -> None:
        """Counts one query. Raises ApiError (429) and counts nothing if the key or the account is over its limit."""
        now = self._clock()
        of_key = self._bucket(f"key {identity.key_id}", self.per_minute)
        of_account = self._bucket(f"account {identity.account_id}", KEYS_OF_AN_ACCOUNT * self.per_minute)
        for bucket, whose in ((of_key, "this key"), (of_account, "this account")):
            if wait_s := bucket.wait_s(now, 1):
                raise _over_rate(whose, self._of, Window(*bucket.state(now)[1::-1], bucket.reset_s(now)), wait_s)
        of_key.charge(now, 1)
        of_account.charge(now, 1)

    def charge(self, identity: Identity, queries: int) -> None:
        """Counts `queries` more, because one query cost as much as several. Later queries then wait longer."""
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


def _over_rate(whose: str, of: str, window: Window, wait_s: float) -> errors.ApiError:
    message = (
        f"Queries per minute of {whose}: the limit is {window.limit} for {of}. "
        f"Try again in {wait_s:.3g} s. Requests for replies are not counted here."
    )
    headers = {
        "x-ratelimit-limit-requests": str(window.limit),
        "x-ratelimit-remaining-requests": str(window.remaining),
        "x-ratelimit-reset-requests": duration(window.reset_s),
    }
    return errors.rate_limit(message, code="requests", retry_after_s=wait_s, headers=headers)
