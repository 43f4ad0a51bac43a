"""The gateway's side of the limiter: sends messages in one ordered stream per shard, and keeps holds alive.

The messages of one gateway reach a shard in the order in which they were sent. A client's next request therefore never
finds its previous one still open. Each account belongs to one shard, by the hash of its id. All gateways must have the
same number of shards, so change it with the service stopped. A gateway whose number differs from a limiter's admits
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from serve_app.contracts.calls import Coalescer, Unavailable, boottime, detached, shard_of
from serve_app.contracts.commands import FindKeys, PostHolds
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.limiting import (
    GRANT_TRUST_S,
    HEARTBEAT_S,
    Adjust,
    Admit,
    Announce,
    Grant,
    Identify,
    Live,
    LiveReport,
    OpenHold,
    Recovering,
    Refusal,
    Release,
    Renew,
    ShardsDiffer,
    SpoolState,
    Status,
    UnknownKey,
    owner_of,
)
from serve_app.contracts.ports import BooksPort, LimiterPort

logger = logging.getLogger("ray.serve")

RETRY_S = 0.1
POST_AGAIN_S: Final = 600.0  # open holds are posted again after this time; the ledger removes them after an hour
MAX_KEYS: Final = 100_000  # keys whose account a gateway remembers: about 20 MB
KEYS_PER_QUERY: Final = 1000
LOOK_UP_TIMEOUT_S: Final = 5.0  # per query to the ledger
LIVE_TIMEOUT_S: Final = 2.0  # maximum wait for the shards' answers to Live; later answers are left out


class LimiterClient:
    """Sends each message to the shard of its account.

    With several shards, a gateway must know a key's account before it can ask a shard. A key's account never changes,
    so each gateway looks it up once. The shard decides whether the key is still valid.

    `holder` is the name under which this gateway leases its holds. `admit_timeout_s` is the maximum wait for a limiter
    that is restarting. `spool` is the state of this gateway's spool, which the heartbeats report. `admit_timeout_s` and
    `spool` may be set at any time.
    """

    def __init__(
        self,
        limiters: Sequence[LimiterPort],
        holder: str,
        accounting: BooksPort,
        *,
        admit_timeout_s: float,
    ) -> None:
        self.holder = holder
        self.admit_timeout_s = admit_timeout_s
        self.spool: SpoolState | None = None
        self.accounting = accounting
        self._accounts: OrderedDict[str, str] = OrderedDict()  # key digest -> account, least recently used first
        self._look_ups: Coalescer[str, str | None] = Coalescer(
            self._find_accounts, timeout_s=LOOK_UP_TIMEOUT_S, most=KEYS_PER_QUERY
        )
        self._routes: dict[str, _Shard] = {}  # shard of each request that is open or being admitted
        self._shards = tuple(_Shard(limiter, self, index, len(limiters)) for index, limiter in enumerate(limiters))

    def start(self) -> None:
        """Starts the heartbeats."""
        for shard in self._shards:
            shard.start()

    async def stop(self) -> None:
        """Stops the heartbeats. Holds that are still open then expire with their lease."""
        await asyncio.gather(*(shard.stop() for shard in self._shards))

    @property
    def open_requests(self) -> int:
        """Number of requests that have a hold."""
        return sum(len(shard.open) for shard in self._shards)

    @property
    def disagreement(self) -> str | None:
        """Reason why nothing is admitted, if a limiter or gateway has a different number of shards; None otherwise."""
        return next((shard.disagreement for shard in self._shards if shard.disagreement is not None), None)

    async def ask(self, ask: Admit | Adjust | Identify | Status) -> Any:
        """Returns the limiter's answer. Raises Unavailable."""
        if isinstance(ask, Admit):
            return await self._admit(ask)
        if len(self._shards) == 1:
            return await self._shards[0].ask(ask)
        match ask:
            case Identify():
                shard = await self._shard_of_key(ask)
                return await shard.ask(ask) if isinstance(shard, _Shard) else shard
            case Adjust():
                route = self._routes.get(ask.request_id)
                if route is None:
                    raise Unavailable("the request is not open here")
                return await route.ask(ask)
            case Status():
                return await self._status(ask)

    async def live(self, ask: Live) -> tuple[LiveReport | None, ...]:
        """Returns the report of each shard, in order; None for a shard that does not answer now. Never raises."""
        return tuple(await asyncio.gather(*(shard.live(ask) for shard in self._shards)))

    def opened(self, admit: Admit, grant: Grant, at: float) -> None:
        """Keeps the grant's hold alive from here on. `at` is the start of the request, in Unix seconds."""
        self._shard_of(grant.account_id).open[grant.request_id] = OpenHold(
            request_id=grant.request_id,
            account_id=grant.account_id,
            key_id=grant.key_id,
            hold=grant.hold,
            tokens_charged=grant.tokens_charged,
            prompt_price=admit.prompt_price,
            output_price=admit.output_price,
            max_tokens=grant.max_tokens,
            backend=admit.backend,
            idempotency_key=admit.idempotency_key,
            opened_at=at,
        )

    def adopt(self, holds: Sequence[OpenHold]) -> None:
        """Keeps a dead gateway's holds alive from here on. Announces them before any later message."""
        for shard in self._shards:
            shard.adopt([hold for hold in holds if self._shard_of(hold.account_id) is shard])

    def disown(self, request_ids: Sequence[str]) -> None:
        """Stops renewing the holds of these requests, because another gateway has adopted them."""
        for request_id in request_ids:
            self._routes.pop(request_id, None)
            for shard in self._shards:
                shard.open.pop(request_id, None)

    def release(self, release: Release) -> None:
        """Ends the hold. Never fails and never waits, because it is called while a request is being cancelled."""
        shard = self._shards[0] if len(self._shards) == 1 else self._routes.pop(release.request_id, None)
        if shard is None and release.account_id is not None:
            shard = self._shard_of(release.account_id)
        if shard is not None:  # otherwise no shard was asked to admit the request
            shard.release(release)

    async def _admit(self, ask: Admit) -> Any:
        found = self._shards[0] if len(self._shards) == 1 else await self._shard_of_key(ask)
        if not isinstance(found, _Shard):
            return found
        # All limiters must have this gateway's number of shards. Otherwise another shard could decide for the account.
        for shard in self._shards:
            if not shard.is_agreed:
                await shard.agree()
        if len(self._shards) == 1:
            return await found.ask(ask)
        # Stored until the release: if this call is cancelled, it is unknown whether the request was admitted.
        self._routes[ask.request_id] = found
        answer = await found.ask(ask)
        if not isinstance(answer, Grant):
            self._routes.pop(ask.request_id, None)
        return answer

    def _shard_of(self, account_id: str) -> _Shard:
        return self._shards[shard_of(account_id, len(self._shards))]

    async def _shard_of_key(self, ask: Admit | Identify) -> _Shard | UnknownKey | Refusal:
        digest, request_id = ask.key_digest, ask.request_id if isinstance(ask, Admit) else ""
        account_id = self._accounts.get(digest)
        if account_id is None:
            if not ask.look_up:
                return UnknownKey(request_id, digest)
            account_id = await self._account_of(digest)
            if account_id is None:
                message = "the API key is not known here: check it or create a new one"
                return Refusal(request_id, 401, "invalid_api_key", message)
        if digest in self._accounts:
            self._accounts.move_to_end(digest)
        return self._shard_of(account_id)

    async def _account_of(self, digest: str) -> str | None:
        """Returns the key's account, or None if the ledger does not know it. Raises Unavailable without the ledger."""
        try:
            async with asyncio.timeout(self.admit_timeout_s):
                return await self._look_ups.submit(digest)
        except TimeoutError:
            raise Unavailable("the ledger is unavailable") from None

    async def _find_accounts(self, digests: list[str]) -> list[str | None]:
        found = await self.accounting.run(FindKeys(tuple(digests)))
        self._accounts |= {digest: key.account_id for digest, (key, _) in found.items()}
        while len(self._accounts) > MAX_KEYS:
            self._accounts.popitem(last=False)
        return [found[digest][0].account_id if digest in found else None for digest in digests]

    async def _status(self, ask: Status) -> tuple[Any, ...]:
        parts: dict[_Shard, list[int]] = {}
        for position, account_id in enumerate(ask.account_ids):
            parts.setdefault(self._shard_of(account_id), []).append(position)
        found: list[Any] = [None] * len(ask.account_ids)

        async def ask_shard(shard: _Shard, positions: list[int]) -> None:
            part = tuple(ask.account_ids[position] for position in positions)
            for position, status in zip(positions, await shard.ask(Status(part)), strict=True):
                found[position] = status

        await asyncio.gather(*(ask_shard(shard, positions) for shard, positions in parts.items()))
        return tuple(found)


class _Shard:
    """One limiter shard: sends messages to it, and renews the holds of its open requests until they are released."""

    def __init__(self, limiter: LimiterPort, client: LimiterClient, index: int, shards: int) -> None:
        self.open: dict[str, OpenHold] = {}
        self.is_agreed = False  # the limiter's last answer confirmed the number of shards
        self.disagreement: str | None = None
        self._client = client
        self._index = index
        self._shards = shards
        self._limiter = limiter
        self._epoch = 0  # the newest epoch under which a limiter has admitted
        self._asks: Coalescer[Any, Any] = Coalescer(self._send, timeout_s=5.0)
        # Look-ups of keys change nothing at the limiter, so they bypass the ordered stream. A slow ledger then delays
        # only the keys that are being looked up.
        self._look_ups: Coalescer[Any, Any] = Coalescer(limiter.ask, timeout_s=5.0)
        self._renewing: asyncio.Task[None] | None = None
        # Requests whose holds are posted in the ledger. None: unknown, as at the start: limiters post holds, too.
        self._posted: frozenset[str] | None = None
        self._posted_at = 0.0
        self._posted_under = 0  # the epoch when the holds were posted
        self._posting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewing = detached(self._renew_forever(), endless=True)

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])

    async def agree(self) -> None:
        """Returns when the limiter has confirmed that it has the same number of shards as this gateway.

        Raises Unavailable when the numbers differ (`disagreement` has the details), or when no limiter answers in time.
        """
        deadline = time.monotonic() + self._client.admit_timeout_s
        while not self.is_agreed:
            try:
                await self._renew()
            except Unavailable:
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                if self.disagreement is not None:
                    raise Unavailable(self.disagreement)

    async def ask(self, ask: Any) -> Any:
        """Returns the limiter's answer, and waits while it restarts. Raises Unavailable when that takes too long.

        Every message is idempotent, so the gateway repeats a message whose answer was lost.
        """
        deadline = time.monotonic() + self._client.admit_timeout_s
        asks = self._look_ups if isinstance(ask, Identify) and ask.look_up else self._asks
        while True:
            wait_s = RETRY_S
            try:
                answer = await asks.submit(ask)
                if not isinstance(answer, Recovering):
                    return answer
                wait_s = max(0.01, answer.retry_in_s)
            except Unavailable:
                if time.monotonic() + wait_s >= deadline:
                    raise
            if time.monotonic() + wait_s >= deadline:
                raise Unavailable("the limiter is restarting")
            await asyncio.sleep(wait_s)

    async def live(self, ask: Live) -> LiveReport | None:
        """Returns the limiter's report, or None if it does not answer now.

        Asks outside the ordered stream, so that live views do not delay admissions.
        """
        try:
            async with asyncio.timeout(LIVE_TIMEOUT_S):
                answer = await self._look_ups.submit(ask)
        except (Unavailable, TimeoutError):
            return None
        return answer if isinstance(answer, LiveReport) else None

    async def _send(self, asks: list[Any]) -> list[Any]:
        """Returns the limiter's answers.

        Replaces a grant that is late or from an ended epoch with Recovering, so that the gateway asks again.
        """
        sent_at = boottime()
        answers = await self._limiter.ask(asks)
        is_late = boottime() - sent_at > GRANT_TRUST_S
        self._epoch = max(self._epoch, *(answer.epoch for answer in answers if isinstance(answer, Grant)), 0)
        return [
            Recovering(answer.request_id, RETRY_S)
            if isinstance(answer, Grant) and (is_late or answer.epoch < self._epoch)
            else answer
            for answer in answers
        ]

    def adopt(self, holds: Sequence[OpenHold]) -> None:
        if holds:
            self.open |= {hold.request_id: hold for hold in holds}
            self._asks.submit(Announce(self._client.holder, tuple(holds)))  # if lost, the next heartbeat repeats it

    def release(self, release: Release) -> None:
        self.open.pop(release.request_id, None)
        detached(self._release(release, self._asks.submit(release)))

    async def _release(self, release: Release, first: asyncio.Future[Any]) -> None:
        try:
            answer = await first
            if not isinstance(answer, Recovering):
                return
        except Unavailable:
            pass
        try:
            await self.ask(release)
        except Unavailable as error:
            # The limiter has lost the hold, or drops it when the lease expires, because nothing renews it any more.
            logger.warning("release of %s did not reach the limiter: %s", release.request_id, error)

    async def _renew(self) -> bool:
        """Renews all holds, and announces those that the limiter does not know. Returns whether the limiter admits.

        If the numbers of shards differ, renews nothing and returns True.
        """
        client, holder = self._client, self._client.holder
        beat = Renew(holder, tuple(self.open), self._shards, client.open_requests, client.spool)
        answer = await self._asks.submit(beat)
        if isinstance(answer, ShardsDiffer):
            self._disagree(answer)
            return True
        self.is_agreed, self.disagreement = True, None
        lost = tuple(self.open[request_id] for request_id in answer.unknown if request_id in self.open)
        if lost:
            await self._asks.submit(Announce(holder, lost))
        if answer.epoch is not None:
            self._epoch = answer.epoch  # may be lower, after a point-in-time recovery of the ledger
        return answer.epoch is not None

    def _post(self, holds: tuple[OpenHold, ...]) -> None:
        """Replaces this gateway's posted holds in the ledger, unless they are up to date or being replaced."""
        is_due = self._posted != {hold.request_id for hold in holds} or self._posted_under != self._epoch
        is_due |= bool(holds) and boottime() - self._posted_at > POST_AGAIN_S
        if is_due and (self._posting is None or self._posting.done()):
            self._posting = detached(self._post_now(holds))

    async def _post_now(self, holds: tuple[OpenHold, ...]) -> None:
        self._posted, self._posted_under = None, self._epoch
        try:
            async with asyncio.timeout(5.0):
                await self._client.accounting.run(PostHolds(owner_of(self._client.holder, self._index), holds))
        except (LedgerUnavailable, Unavailable, TimeoutError) as error:
            logger.warning("open holds could not be posted: %s: %s", type(error).__name__, error)
        else:
            self._posted, self._posted_at = frozenset(hold.request_id for hold in holds), boottime()

    def _disagree(self, answer: ShardsDiffer) -> None:
        if answer.shards != self._shards:
            problem = f"limiter_shards is {answer.shards} in a limiter and {self._shards} in this gateway"
        else:
            problem = f"a gateway with limiter_shards {answer.other} instead of {self._shards} has requests open"
        if problem != self.disagreement:
            logger.error("nothing is admitted: %s; change the number with the service stopped", problem)
        self.is_agreed, self.disagreement = False, problem

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                admits = await self._renew()
            except Unavailable as error:
                logger.warning("holds could not be renewed: %s", error)
                admits = False
            except Exception:
                logger.exception("renewing holds failed")
                continue
            # While no limiter of this service admits, one of another service on the same ledger may take over. It reads
            # the posted holds.
            self._post(() if admits else tuple(self.open.values()))
