"""The limiter's process without Ray: admission, with accounts and keys that it reads from the ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from math import inf
from random import Random
from typing import Any, TypeGuard

from serve_app.contracts import metrics as declared
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.calls import Coalescer, detached
from serve_app.contracts.commands import FindKeys, ReadChanges
from serve_app.contracts.limiting import (
    Adjust,
    Admit,
    Announce,
    Ask,
    Identify,
    Live,
    PressureReport,
    Recovering,
    Refusal,
    Release,
    Renew,
    Renewed,
    Status,
    UnknownKey,
)
from serve_app.contracts.metric import Metrics
from serve_app.contracts.money import NANO_PER_UNIT
from serve_app.contracts.ports import BooksPort
from serve_app.limiter import refusals
from serve_app.limiter.admission import AWAIT_LEASE_S, Admission
from serve_app.limiter.shard_count import ShardCount
from serve_app.limiter.tenure import Tenure

logger = logging.getLogger("ray.serve")

POLL_S = 0.25  # between two reads of the ledger's changes: the maximum delay of a revocation or a top-up
CALL_TIMEOUT_S = 5.0  # timeout per call to the ledger
FEED_TIMEOUT_S = 2.5  # timeout per read of the feed: short, because a lost answer must not make keys stale
LOOKUP_WAIT_S = 0.5  # maximum time by which the look-up of an unknown key delays a list of messages
EXPIRE_S = 1.0  # between two checks for expired leases
STALLED_S = 3.0  # a longer time between two such checks means that the process was paused and renewals wait unread
STUCK_S = 30.0  # maximum time for one iteration of a background task; normally a few seconds at most
LEASE_RETRY_S = 0.5
MAX_WAIT_S = 10.0  # maximum time between two renewals
DEMAND_S = 2.5  # window of `demand`
ASKED_AGAIN_S = 30.0  # time during which a gateway may ask again for one request
MAX_ASKED = 50_000
UNREAD_S = 3.0  # after a pause, time to read the renewals that wait, before any hold expires
IDLE_S = 600.0  # keys and accounts without a request for this time are dropped; far above CALL_TIMEOUT_S
MAX_FORGOTTEN = 2000  # keys and accounts to check in one round
MAX_LOOKUPS = 4000  # keys looked up at a time; the gateway must repeat messages with unknown keys beyond that
KEYS_PER_QUERY = 1000
FROM_NOW = 2**62  # above every version, so the answer has only the ledger's current version


class LimiterService:
    """Answers gateways. Stores nothing durably: balances come from the ledger, open holds from the gateways.

    Each complete read of the ledger's changes confirms every key and account that is known here. If no read succeeds
    for `staleness_s`, a revocation may have been missed. All keys then get 503 until a read succeeds.
    """

    def __init__(
        self,
        admission: Admission,
        accounting: BooksPort,
        *,
        lookup_wait_s: float = LOOKUP_WAIT_S,
        shards: int = 1,
        staleness_s: float = inf,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = admission
        admission.shares.shards = shards
        self._shard_count = ShardCount(shards, clock, admission.lease_s)
        self._accounting = accounting
        self._lookup_wait_s = lookup_wait_s
        self._clock = clock
        self._metrics = metrics
        self._staleness_s = staleness_s
        self._confirmed_at = -inf  # the keys and accounts known here are at least as new as the ledger at this time
        self.tenure: Tenure | None = None  # None: no other limiter can ever decide for the same accounts
        self._asked: dict[str, float] = {}  # request to admit -> when it first arrived
        self._version: int | None = None
        self._rng = Random()
        self._tidied_at = self._followed_at = self._held_at = clock()
        self._expires_nothing_until = 0.0  # time on `clock` until which no hold expires; see UNREAD_S
        self._lookups: dict[str, asyncio.Future[bool]] = {}
        # One query at a time, for all unknown keys. So invalid keys cannot overload the ledger with queries, and a
        # valid key waits for two queries at most.
        self._queries: Coalescer[str, bool] = Coalescer(self._find, timeout_s=CALL_TIMEOUT_S, most=KEYS_PER_QUERY)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def stale_s(self) -> float:
        """Seconds since the ledger last confirmed all known keys and accounts; infinite before the first time."""
        return self._clock() - self._confirmed_at

    def start(self) -> None:
        """Starts the tasks that hold the lease, follow the ledger, expire holds and drop idle accounts."""
        self._tasks = [detached(self._follow_forever()), detached(self._expire_forever())]
        if self.tenure is not None:
            self._tasks.append(detached(self._hold_forever(self.tenure)))

    async def stop(self) -> None:
        """Stops the tasks of `start` and releases the lease, so that a successor can begin at once."""
        if self.tenure is not None:
            try:
                await self.tenure.end()
            except Exception as error:
                logger.warning("the limiter's lease was not released: %s: %s", type(error).__name__, error)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def is_alive(self) -> bool:
        """Whether the tasks of `start` make progress. Retries while the ledger is unavailable count as progress."""
        now = self._clock()
        turned = (self._followed_at, self._tidied_at, self._held_at)[: len(self._tasks)]
        return not any(task.done() for task in self._tasks) and all(now - at < STUCK_S for at in turned)

    def demand(self) -> int:
        """Returns how many requests first asked for admission in the last DEMAND_S seconds."""
        now = self._clock()
        for request_id, came_at in list(islice(self._asked.items(), MAX_ASKED)):
            if came_at > now - ASKED_AGAIN_S and len(self._asked) <= MAX_ASKED:
                break
            del self._asked[request_id]
        return sum(1 for _ in takewhile(lambda at: at > now - DEMAND_S, reversed(self._asked.values())))

    async def ask(self, asks: Sequence[Ask]) -> list[Any]:
        """Returns one answer for each message, in order. The messages take effect in order, too.

        Unknown keys are looked up before the first message takes effect. Otherwise a list that admits and releases a
        request could release it first. A list without unknown keys never waits for the ledger.
        """
        unknown = [
            ask.key_digest
            for ask in asks
            if _looks_up(ask) and ask.key_digest and not self.admission.knows(ask.key_digest)
        ]
        looked_up = await self._look_up(unknown) if unknown else {}
        return [self._answer(ask, looked_up) for ask in asks]

    async def _look_up(self, digests: list[str]) -> dict[str, bool]:
        """Returns whether the ledger knows each key. Leaves out keys without an answer in time."""
        if self._version is None:
            # Without a known version of the ledger, this limiter could miss the revocation of a key after its look-up.
            return {}
        for digest in digests:
            if digest not in self._lookups and len(self._lookups) < MAX_LOOKUPS:
                lookup = self._lookups[digest] = self._queries.submit(digest)
                lookup.add_done_callback(partial(self._end_lookup, digest))
        lookups = {digest: self._lookups[digest] for digest in digests if digest in self._lookups}
        if lookups:
            await asyncio.wait(lookups.values(), timeout=self._lookup_wait_s)
        return {
            digest: lookup.result()
            for digest, lookup in lookups.items()
            if lookup.done() and lookup.exception() is None  # otherwise the ledger has not answered
        }

    def _end_lookup(self, digest: str, _: asyncio.Future[bool]) -> None:
        del self._lookups[digest]

    async def _find(self, digests: list[str]) -> list[bool]:
        """Returns whether the ledger knows each of these keys. Raises when the ledger is unavailable."""
        try:
            found = await self._accounting.run(FindKeys(tuple(digests)))
        except Exception as error:
            logger.warning("could not look up %d keys: %s: %s", len(digests), type(error).__name__, error)
            raise
        for key, account in found.values():
            self.admission.apply(account)
            self.admission.apply(key)
        return [digest in found for digest in digests]

    def _answer(self, ask: Any, looked_up: dict[str, bool]) -> Any:
        try:
            answer = self._decide(ask)
        except Exception:
            # An error in one message must not fail the others in its list.
            logger.exception("the limiter failed on %s", type(ask).__name__)
            message = "The service failed to admit this request. Try again."
            return Refusal(getattr(ask, "request_id", ""), 503, "overloaded", message, 1.0)
        if not isinstance(answer, UnknownKey) or not _looks_up(ask):
            return answer
        if looked_up.get(answer.key_digest) is False:
            if isinstance(ask, Adjust):
                return refusals.lost(ask.request_id, self._rng)
            message = "the API key is not known here: check it or create a new one"
            return Refusal(answer.request_id, 401, "invalid_api_key", message)
        # The ledger has not answered yet, or its answer was older than a settlement: the gateway must ask again.
        return Recovering(answer.request_id, POLL_S)

    def _decide(self, ask: Ask) -> Any:
        if isinstance(ask, Admit) and self.tenure is not None:
            self._asked.setdefault(ask.request_id, self._clock())
            if not self.admission.admits:
                return Recovering(ask.request_id, AWAIT_LEASE_S)
        if isinstance(ask, Admit | Identify) and self.stale_s > self._staleness_s and self._version is not None:
            return refusals.unconfirmed(getattr(ask, "request_id", ""), self._rng)
        match ask:
            case Admit():
                return self.admission.admit(ask)
            case Release():
                return self.admission.release(ask)
            case Renew():
                epoch = self.admission.epoch if self.admission.admits else None
                return self._shard_count.objection(ask) or Renewed(self.admission.renew(ask), epoch)
            case Adjust():
                return self.admission.adjust(ask)
            case Identify():
                return self.admission.identify(ask)
            case Announce():
                for hold in ask.holds:
                    self.admission.announce(hold, ask.holder)
                return True
            case PressureReport():
                return self.admission.report(ask)
            case Status():
                return tuple(self.admission.status(account_id) for account_id in ask.account_ids)
            case Live():
                return self.admission.live(ask)
        raise TypeError(f"the limiter does not know {type(ask).__name__}")

    async def follow(self) -> bool:
        """Applies the ledger's changes since the last read. Returns whether the ledger has more changes to read."""
        # The first read gets only the version: accounts are looked up when their keys arrive.
        since = FROM_NOW if self._version is None else self._version
        asked_at = self._clock()
        async with asyncio.timeout(FEED_TIMEOUT_S):
            changes = await self._accounting.run(ReadChanges(since))
        for account in changes.accounts:
            self._apply(account)
        for key in changes.keys:
            self._apply(key)
        self._version = changes.version
        if not changes.more:
            self._confirmed_at = max(self._confirmed_at, asked_at)
        return changes.more

    def _apply(self, snapshot: AccountSnapshot | KeySnapshot) -> None:
        """Applies a change if its account is known here. In a large service, most accounts are not known here.

        During look-ups, applies every change, because the answer of a look-up may be older than the change. Look-ups
        that start later read newer states.
        """
        if self._lookups or self.admission.knows_account(snapshot.account_id):
            self.admission.apply(snapshot)

    async def _follow_forever(self) -> None:
        while True:
            self._followed_at = self._clock()
            try:
                if await self.follow():
                    continue
            except Exception as error:
                logger.warning("the ledger could not be followed: %s: %s", type(error).__name__, error)
            await asyncio.sleep(POLL_S)

    async def _hold_forever(self, tenure: Tenure) -> None:
        while True:
            self._held_at = self._clock()
            try:
                wait_s = await tenure.turn()
            except Exception as error:
                logger.warning("the limiter's lease could not be renewed: %s: %s", type(error).__name__, error)
                wait_s = LEASE_RETRY_S
            await asyncio.sleep(min(wait_s, MAX_WAIT_S))

    def tidy(self) -> None:
        """Drops the holds whose lease has expired, and keys and accounts that have been idle for IDLE_S."""
        now = self._clock()
        if now - self._tidied_at > STALLED_S:
            self._expires_nothing_until = now + UNREAD_S
        self._tidied_at = now
        if now >= self._expires_nothing_until:
            for request_id in self.admission.expire():
                self._count_expired()
                logger.warning("hold of %s expired: its gateway sends no heartbeats", request_id)
        self.admission.forget_idle(IDLE_S, MAX_FORGOTTEN)

    def _report(self) -> None:
        if self._metrics is None or self.tenure is None:
            return
        shard = str(self.tenure.shard)
        self._metrics.set(declared.LIMITER_EPOCH, self.admission.epoch if self.admission.admits else 0, shard)
        if self.stale_s < inf:
            self._metrics.set(declared.FEED_AGE_SECONDS, self.stale_s, shard)
        holds, nano = self.admission.held()
        self._metrics.set(declared.HOLDS, holds, shard)
        self._metrics.set(declared.HELD, nano / NANO_PER_UNIT, shard)
        for backend, pressure, share in self.admission.shares.levels(self._clock()):
            self._metrics.set(declared.PRESSURE, pressure, shard, backend)
            self._metrics.set(declared.EFFECTIVE_SHARE, share, shard, backend)

    def _count_expired(self) -> None:
        if self._metrics is not None and self.tenure is not None:
            self._metrics.add(declared.EXPIRED_HOLDS, 1, str(self.tenure.shard))

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            try:
                self.tidy()
                self._report()
            except Exception:
                logger.exception("could not drop expired holds, drop idle accounts or report metrics")


def _looks_up(ask: Any) -> TypeGuard[Admit | Identify | Adjust]:
    """Returns whether an unknown key in this message is looked up."""
    return isinstance(ask, Adjust) or (isinstance(ask, Admit | Identify) and ask.look_up)
