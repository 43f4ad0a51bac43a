"""The limiter's process without Ray: admission over accounts and keys that are looked up in, and follow, the ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serve_app.gateway.ports import AccountingPort
from serve_app.gateway.tasks import detached
from serve_app.ledger.messages import AccountSnapshot, Changes, KeySnapshot
from serve_app.limits import Admission, UnknownKey
from serve_app.limits.messages import (
    AccountState,
    AccountStatus,
    Adjust,
    Admit,
    Announce,
    Identify,
    KeyState,
    PressureReport,
    Recovering,
    Refusal,
    Release,
    Renew,
    Status,
)  # fmt: skip
from serve_app.limits.shard_count import ShardCount

logger = logging.getLogger("ray.serve")

POLL_S = 0.25  # how stale a revocation or a top-up can be
CALL_TIMEOUT_S = 5.0  # of one question to the ledger: a lost answer must not stop the feed
LOOKUP_WAIT_S = 0.5  # so long an unknown key may hold up what was asked together with it
EXPIRE_S = 1.0
IDLE_S = 600.0  # after so long without a request, keys and accounts are forgotten; far above CALL_TIMEOUT_S
MOST_FORGOTTEN = 2000  # in one round of EXPIRE_S
MOST_LOOKUPS = 1000  # at a time; whoever comes on top of them asks again
FROM_NOW = 2**62  # beyond any version: answers only where the ledger stands


class LimiterService:
    """Answers gateways. All its state is soft: balances come from the ledger, open holds from the gateways."""

    def __init__(
        self,
        admission: Admission,
        accounting: AccountingPort,
        *,
        lookup_wait_s: float = LOOKUP_WAIT_S,
        shards: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = admission
        admission.shares.shards = shards
        self._shard_count = ShardCount(shards, clock, admission.lease_s)
        self._accounting = accounting
        self._lookup_wait_s = lookup_wait_s
        self._version: int | None = None
        self._lookups: dict[str, asyncio.Task[bool | None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Follows the ledger, drops expired leases and forgets who is idle from here on."""
        self._tasks = [detached(self._follow_forever()), detached(self._expire_forever())]

    def stop(self) -> None:
        """Ends what `start` began."""
        for task in self._tasks:
            task.cancel()

    @property
    def is_alive(self) -> bool:
        """Whether the ledger is followed and leases expire."""
        return not any(task.done() for task in self._tasks)

    async def ask(self, asks: Sequence[Any]) -> list[Any]:
        """One answer for each ask, in order; they take effect in order, too.

        Unknown keys are looked up before the first ask takes effect: a request that is admitted and released in one
        list would otherwise be admitted last. While the ledger does not answer, only asks with unknown keys wait.
        """
        known = await self._look_up(dict.fromkeys(ask.key_digest for ask in asks if self._is_unknown(ask)))
        return [self._answer(ask, known) for ask in asks]

    def _is_unknown(self, ask: Any) -> bool:
        return isinstance(ask, Admit | Identify) and ask.look_up and not self.admission.knows(ask.key_digest)

    async def _look_up(self, digests: Iterable[str]) -> dict[str, bool]:
        """Which of the keys the ledger knows; those that it did not tell in time are missing."""
        if self._version is None:
            # A key looked up before the ledger is followed could be revoked without this limiter hearing of it.
            return {}
        tasks = {
            digest: self._lookup(digest)
            for digest in digests
            if digest in self._lookups or len(self._lookups) < MOST_LOOKUPS
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._lookup_wait_s)
        found = {digest: task.result() for digest, task in tasks.items() if task.done()}
        return {digest: known for digest, known in found.items() if known is not None}

    def _lookup(self, digest: str) -> asyncio.Task[bool | None]:
        task = self._lookups.get(digest)
        if task is None:
            task = self._lookups[digest] = detached(self._find(digest))
            task.add_done_callback(lambda _: self._lookups.pop(digest, None))
        return task

    async def _find(self, digest: str) -> bool | None:
        """Whether the ledger knows the key; None when the ledger is away."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                pair = await self._accounting.call("find_key", {"digest": digest})
        except Exception as error:
            logger.warning("a key could not be looked up: %s: %s", type(error).__name__, error)
            return None
        if pair is None:
            logger.info("a key that the ledger does not know was refused")
            return False
        key, account = pair
        self.admission.apply(_account_state(account))
        self.admission.apply(_key_state(key))
        return True

    def _answer(self, ask: Any, known: dict[str, bool]) -> Any:
        request_id = getattr(ask, "request_id", "")
        try:
            answer = self._decide(ask)
        except Exception:
            # Whatever is wrong with this ask, those that came together with it are not to blame.
            logger.exception("the limiter failed on %s", type(ask).__name__)
            return Refusal(request_id, 503, "overloaded", "The service failed to admit this request. Try again.", 1.0)
        if not isinstance(answer, UnknownKey) or not ask.look_up:
            return answer
        if known.get(ask.key_digest) is False:
            message = "the API key is not known here: check it or create a new one"
            return Refusal(request_id, 401, "invalid_api_key", message)
        # The ledger did not answer yet, or what it answered was overtaken by a settlement: ask again.
        return Recovering(request_id, POLL_S)

    def _decide(self, ask: Any) -> Any:
        match ask:
            case Admit():
                return self.admission.admit(ask)
            case Release():
                return self.admission.release(ask)
            case Renew():
                return self._shard_count.hear(ask) or self.admission.renew(ask)
            case Adjust():
                return self.admission.adjust(ask)
            case Identify():
                return self.admission.identify(ask)
            case Announce():
                for hold in ask.holds:
                    self.admission.announce(hold, ask.holder)
                return True
            case PressureReport():
                self.admission.report(ask)
                return self.admission.shares.shards
            case Status():
                return tuple(self._status(account_id) for account_id in ask.account_ids)
        raise TypeError(f"the limiter does not know {type(ask).__name__}")

    def _status(self, account_id: str) -> AccountStatus:
        admission = self.admission
        return AccountStatus(
            account_id,
            admission.held(account_id),
            admission.open_requests(account_id),
            admission.effective(account_id),
            admission.pressed(account_id),
        )

    async def follow(self) -> bool:
        """Applies what changed in the ledger since the last time; True when there is more at once."""
        # The first time only learns where the ledger stands: accounts are looked up when their keys come.
        since = FROM_NOW if self._version is None else self._version
        async with asyncio.timeout(CALL_TIMEOUT_S):
            changes: Changes = await self._accounting.call("changes", {"since": since, "limit": 1000})
        for account in changes.accounts:
            self._apply(_account_state(account))
        for key in changes.keys:
            self._apply(_key_state(key))
        self._version = changes.version
        return changes.more

    def _apply(self, state: AccountState | KeyState) -> None:
        """Applies a change, unless nobody can miss it: most of a large service's accounts are not known here.

        What was asked of the ledger and has not come yet may be older than the change, so that is applied, too. What is
        asked from now on is newer.
        """
        if self._lookups or self.admission.knows_account(state.account_id):
            self.admission.apply(state)

    async def _follow_forever(self) -> None:
        while True:
            try:
                if await self.follow():
                    continue
            except Exception as error:
                logger.warning("the ledger could not be followed: %s: %s", type(error).__name__, error)
            await asyncio.sleep(POLL_S)

    def tidy(self) -> None:
        """Drops what has expired and some of what has been idle for long."""
        for request_id in self.admission.expire():
            logger.warning("hold of %s expired: its gateway is gone", request_id)
        self.admission.forget_idle(IDLE_S, MOST_FORGOTTEN)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            try:
                self.tidy()
            except Exception:
                logger.exception("leases could not be expired, or idle accounts not forgotten")


def _account_state(account: AccountSnapshot) -> AccountState:
    return AccountState(
        account.account_id, account.active, account.balance, account.version, account.rpm, account.tpm,
        account.concurrency, account.weight, account.expiring,
    )  # fmt: skip


def _key_state(key: KeySnapshot) -> KeyState:
    return KeyState(
        key.digest, key.key_id, key.account_id, key.active, key.version, key.models, key.rpm, key.tpm, key.concurrency,
        key.budget, key.budget_period, key.spent, key.spent_period, key.spent_version, key.expires_at,
    )  # fmt: skip
