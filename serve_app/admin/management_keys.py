"""Identifies management keys: looks them up in the ledger and caches them for a few seconds."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request

from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.contracts.books import AccountSnapshot
from serve_app.contracts.key_format import MANAGEMENT, digest, well_formed
from serve_app.contracts.limiting import Identity
from serve_app.contracts.management import FindManagementKey, ManagementKey
from serve_app.gateway.authentication import Authenticator, sent_key
from serve_app.gateway.wrong_keys import Verdict

REMEMBERED_S: Final = 10.0  # how long a key may still work after it or its account was disabled
MAX_REMEMBERED: Final = 10_000  # the key confirmed longest ago is evicted first
MAX_WAITING: Final = 100  # maximum waiting look-ups for addresses that have sent too many wrong keys

NOT_WELL_FORMED: Final = "this needs a management key of your account: copy it completely from the console"
NOT_KNOWN: Final = "the management key is not known here: check it or create a new one"
REVOKED: Final = "This management key has been revoked. Use another key."
EXPIRED: Final = "This management key has expired. Use another key."
SUSPENDED: Final = "The account of this management key is suspended. Ask the operator of this service to reactivate it."

Find = Callable[[FindManagementKey], Awaitable[tuple[ManagementKey, AccountSnapshot] | None]]


class ManagementKeys:
    """Checks management keys. `find` queries the ledger, `now` returns Unix seconds.

    `clock` returns seconds and never runs backwards.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        find: Find,
        now: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._authenticator = authenticator
        self._find = find
        self._now = now
        #: Key digest -> (end of the cache entry, key).
        self._remembered: OrderedDict[str, tuple[float, ManagementKey]] = OrderedDict()
        self._one_by_one = asyncio.Semaphore(1)
        self._waiting = 0

    async def identify(self, request: Request) -> Identity:
        """Returns the ids of account and key. Raises ApiError: 401, 429 (too many wrong keys), 503 (no ledger)."""
        key = sent_key(request.headers)
        if not well_formed(key, MANAGEMENT):
            raise self._wrong(request, NOT_WELL_FORMED)
        found = digest(key)
        until, known = self._remembered.get(found, (0.0, None))
        if known is None or until <= self.clock():
            known = await self._look_up(request, found)
        if known.expires_at is not None and known.expires_at <= self._now():
            raise self._wrong(request, EXPIRED)
        return Identity(known.account_id, known.key_id)

    async def _look_up(self, request: Request, found: str) -> ManagementKey:
        """Reads the key from the ledger and caches it. Raises ApiError."""
        self._remembered.pop(found, None)
        asked_at = self.clock()
        answer = await self._ask(request, found)
        if answer is None:
            raise self._wrong(request, NOT_KNOWN)
        key, account = answer
        if key.revoked_at is not None:
            raise self._wrong(request, REVOKED)
        if not account.active:
            raise self._wrong(request, SUSPENDED)
        self._remembered[found] = asked_at + REMEMBERED_S, key
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        self._authenticator.wrong_keys.right(found)
        return key

    async def _ask(self, request: Request, found: str) -> tuple[ManagementKey, AccountSnapshot] | None:
        """Queries the ledger. Look-ups for an address that has sent too many wrong keys run one at a time.

        Clients that guess keys therefore can't overload the ledger.
        """
        wrong_keys = self._authenticator.wrong_keys
        verdict = wrong_keys.verdict(self._authenticator.address_of(request), found)
        if verdict is Verdict.WRONG:
            return None
        if verdict is Verdict.LOOK_UP:
            answer = await self._find(FindManagementKey(found))
        else:
            if self._waiting >= MAX_WAITING:
                raise errors.overloaded("too many keys are being looked up: try again", retry_after_s=2)
            self._waiting += 1
            try:
                async with self._one_by_one:
                    answer = await self._find(FindManagementKey(found))
            finally:
                self._waiting -= 1
        wrong_keys.looked_up(found, answer is None)
        return answer

    def _wrong(self, request: Request, message: str) -> ApiError:
        return self._authenticator.wrong(request, message)
