"""Delivers settlements, and the replies in them, to the ledger: each arrives exactly once, even when processes die.

A settlement waits in one place at a time. The gateway first sends it to the ledger. If the ledger does not answer for
longer than a client can be kept waiting, the gateway takes the settlement back and makes it durable in the gateway's
spool. Then the client gets its last chunk.

After such a failure, new settlements go directly to the spool, until the ledger answers a replay of the spool. A ledger
that is coming back therefore gets only the replay. After that, replayed and live settlements take turns: one batch of
the spool is in flight at a time. A hold ends when its settlement has been replayed.

The gateway that takes over a dead gateway's spool also takes over the holds of its settlements, before their leases
expire. The account therefore cannot spend this part of its balance again, however long the outage lasts. A retry under
the request's idempotency key is not admitted before its reply can be found.

When a gateway is removed, its disk may be deleted. It therefore hands over the settlements that it could not send to
the ledger in time. Another gateway makes them durable and adopts their holds before it answers. If the answer is lost,
both gateways have the settlements, and the ledger books each request once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from serve_app.contracts import metrics
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.books import (
    Outcome,
    Refusal,
    Settled,
    Settlement,
    SettlementRejected,
    StoredReply,
    StoredResponse,
)
from serve_app.contracts.calls import Coalescer, Unavailable, detached, shard_of
from serve_app.contracts.commands import Answer, Command, FindReply, FindResponse
from serve_app.contracts.errors import LedgerUnavailable, SpoolFull
from serve_app.contracts.limiting import OpenHold, Release, SpoolState
from serve_app.contracts.metric import Metrics
from serve_app.contracts.ports import SettleAnswer
from serve_app.contracts.rates import Rates
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.storage.spool import Spool, measure

logger = logging.getLogger("ray.serve")

RETRY_S = 0.1  # between two calls to the ledger for one settlement
REPLAY_S = 0.5  # between two replays while the ledger is unavailable
ADOPT_S = 1.0  # maximum time until a dead gateway's spool is found, before its holds expire
REPLAY_BATCH = 256  # settlements per batch of a replay; live and replayed settlements take turns
FIND_TIMEOUT_S = 10.0  # maximum wait for the ledger's answer to a command, such as FindReply
DISK_TIMEOUT_S = 60.0  # after this time without a flush the disk counts as broken
FULL = 0.9  # above this share of its limit the spool counts as full; the rest is for running requests
MAX_RETRYING_ACCOUNTS = 10_000  # accounts whose look-ups of stored replies are counted; about 2 MB

Send = Callable[[list[Settlement]], Awaitable[Sequence[Settled | SettlementRejected]]]


class Settlements:
    """Settles usage for one gateway process.

    `settle_timeout_s` is how long a client's last chunk waits for the ledger. It may be set at any time.
    """

    def __init__(
        self,
        accounting: AccountingShards,
        spool: Spool,
        metrics: Metrics,
        limiter: LimiterClient,
        *,
        settle_timeout_s: float,
    ) -> None:
        self._accounting = accounting
        self.spool = spool
        self.replays = Rates(time.monotonic, MAX_RETRYING_ACCOUNTS)  # look-ups of stored replies and responses
        self._spooled = spool.size
        self._metrics = metrics
        self._limiter = limiter
        self._ledger_is_unavailable = False  # True from a failed call until the ledger has answered a replay
        self._unkept: dict[str, Settlement] = {}  # by request id: settlements that neither ledger nor spool has
        self._unserved: set[str] = set()  # requests refused after admission, whose settlement waits for a replay
        self._calls: list[Coalescer[Settlement, SettleAnswer]] = [
            Coalescer(shard.settle, timeout_s=settle_timeout_s) for shard in accounting.shards
        ]
        # Settlements that wait for the disk at the same time share one flush.
        self._keeping: Coalescer[Settlement, bool] = Coalescer(self._append_batch, timeout_s=DISK_TIMEOUT_S)
        self._to_replay = asyncio.Event()
        self._replaying: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[Any] | None = None  # task that sends a batch of the spool to accounting
        self._is_leaving = False

    @property
    def settle_timeout_s(self) -> float:
        return self._calls[0].timeout_s

    @settle_timeout_s.setter
    def settle_timeout_s(self, seconds: float) -> None:
        for calls in self._calls:
            calls.timeout_s = seconds

    @property
    def is_full(self) -> bool:
        """Whether new requests must be refused, because the spool may have no room for their settlements."""
        return bool(self._unkept) or self._spooled > FULL * self.spool.max_bytes

    def start(self) -> None:
        """Starts to replay this gateway's spool, and the spools that dead gateways left behind.

        Announces the holds of dead gateways to the limiter before any other message.
        """
        self._is_leaving = False
        self._adopt(self.spool.adopt_orphans())
        self._spooled = self.spool.size
        self._to_replay.set()
        self._replaying = detached(self._replay_forever(), endless=True)

    async def stop(self, within_s: float = 0.0) -> None:
        """Stops replaying. Pending settlements stay in the spool for another gateway.

        While settlements are pending, replaying continues for up to `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        while self.pending and time.monotonic() < deadline:
            self._to_replay.set()
            await asyncio.sleep(0.05)
        self._is_leaving = True
        if self._replaying is not None:
            self._replaying.cancel()
            self._cancel_batch()
            await asyncio.wait([self._replaying])

    async def hand_over(self, take_over: Callable[[list[Settlement]], Awaitable[bool]], within_s: float) -> None:
        """Gives the pending settlements and their holds to another gateway, after `stop`.

        `take_over` is that gateway's method. Settlements that it does not take within `within_s` seconds stay in the
        spool.
        """

        is_over = False

        async def give(batch: list[Settlement]) -> Sequence[Settled]:
            if is_over:
                raise Unavailable("the time is over")
            request_ids = [settlement.request_id for settlement in batch]
            if not await take_over(batch):
                raise Unavailable("no other gateway has room for them")
            self._limiter.disown(request_ids)
            return [Settled(request_id, 0, 0, 0) for request_id in request_ids]

        pending = self.pending
        if not pending:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._send_unkept(give)
                await asyncio.to_thread(self._replay, asyncio.get_running_loop(), give)
        except Exception as error:
            is_over = True
            self._cancel_batch()
            logger.error(
                "%d settlements were not handed over and stay on this disk: %s: %s",
                self.pending,
                type(error).__name__,
                error,
            )
        if moved := pending - self.pending:
            logger.warning("handed over %d settlements, which the ledger has not taken", moved)

    async def take_over(self, batch: list[Settlement]) -> bool:
        """Takes over the settlements, and their holds, of a gateway that is being removed.

        Returns whether all of them are on this gateway's disk. This gateway then settles them.
        """
        if self._replaying is None or self._is_leaving or self.is_full:
            return False
        self._adopt(batch)  # before the append, after which a replay may settle them and release their holds
        if not all(await self._append_batch(batch)):
            self._limiter.disown([settlement.request_id for settlement in batch])
            return False
        self._to_replay.set()
        return True

    @property
    def pending(self) -> int:
        """Number of settlements that wait for a replay: in the spool, or in memory because the spool is full."""
        return self.spool.waiting + len(self._unkept)

    async def close(self) -> None:
        """Removes the spool's files if it is empty. Nothing may be settled after this call."""
        if not self.spool.waiting:
            await asyncio.to_thread(self.spool.close)

    async def settle(self, settlement: Settlement, *, refused: bool = False) -> Settled | None:
        """Returns when the usage is durable. Ensures that the hold is released; `refused` is passed on to the release.

        Returns Settled when the ledger has settled the request; the hold is then released at once. Returns None when
        the settlement is in the spool, whose replay releases the hold, or when it is stuck in the ledger.

        Raises SpoolFull when neither the ledger nor the spool has the settlement. `is_full` is then true. The client of
        a complete reply gets an error, so the request is settled as failed. It is settled, and its hold released, when
        the ledger is back. Raises RuntimeError when the ledger refuses the settlement, or has neither booked it
        nor set it aside. The caller must then release the hold.
        """
        started = time.monotonic()
        answer = None
        if not self._ledger_is_unavailable:
            answer = await self._from_ledger(settlement, started + self.settle_timeout_s)
        if answer is None:
            if refused:
                self._unserved.add(settlement.request_id)
            await self._keep(settlement)
            self._count_outcome("spooled", started)
            return None
        if isinstance(answer, SettlementRejected):
            self._count_outcome("rejected", started)
            if not answer.kept or answer.refusal is not Refusal.FAILED:
                logger.critical("the ledger refuses %r: %s", settlement, answer.message)
                raise RuntimeError(f"the ledger refuses settlement {settlement.request_id}: {answer.message}")
            logger.error("settlement %s is stuck: %s", settlement.request_id, answer.message)
            self._limiter.release(release_of(settlement, None, refused=refused))
            return None
        self._count_outcome(settlement.outcome.value, started)
        self._limiter.release(release_of(settlement, answer, refused=refused))
        return answer

    async def find_reply(self, account_id: str, idempotency_key: str) -> StoredReply | None:
        """Returns the reply that a settlement of the last 24 hours has stored, or None.

        Raises Unavailable while the ledger is unavailable, because it is then unknown whether there is one.
        """
        return await self.ask(FindReply(account_id, idempotency_key))

    async def find_response(self, account_id: str, response_id: str) -> StoredResponse | None:
        """Returns a stored response of the account, or None. Raises Unavailable while the ledger is unavailable."""
        return await self.ask(FindResponse(account_id, response_id))

    async def ask(self, command: Command[Answer]) -> Answer:
        """Returns the ledger's answer. Raises Unavailable after FIND_TIMEOUT_S."""
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                return await self._accounting.run(command)
        except (LedgerUnavailable, TimeoutError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from None

    async def _from_ledger(self, settlement: Settlement, deadline: float) -> Settled | SettlementRejected | None:
        """Returns the ledger's answer, or None if there is none by `deadline`.

        After None, the settlement is no longer queued for sending.
        """
        calls = self._calls[shard_of(settlement.account_id, len(self._calls))]
        while True:
            try:
                # Not `wait_for`, which in Python 3.11 can swallow a cancellation.
                async with asyncio.timeout(max(0.01, deadline - time.monotonic())):
                    answer = await calls.submit(settlement)
                if not isinstance(answer, LedgerUnavailable):
                    return answer
                failure: Exception = answer
            except (Unavailable, TimeoutError) as error:
                failure = error
            if self._ledger_is_unavailable or time.monotonic() + RETRY_S >= deadline:
                logger.warning("ledger unavailable (%s): spooled settlement %s", failure, settlement.request_id)
                return None
            await asyncio.sleep(RETRY_S)

    async def _keep(self, settlement: Settlement) -> None:
        """Returns when the settlement is in the spool. Raises SpoolFull."""
        # Only a replay clears this flag, so a process that does not replay must not set it.
        self._ledger_is_unavailable = self._replaying is not None
        try:
            is_kept = await self._keeping.submit(settlement)
        except Unavailable as error:
            logger.error("the disk of the spool does not answer: %s", error)
            is_kept = False
        self._to_replay.set()
        if is_kept:
            return
        # If this process ends before the ledger is back, this usage can still be found in the log.
        logger.critical("neither ledger nor spool took %r", settlement)
        if settlement.outcome is Outcome.COMPLETED:
            # The client gets an error instead of the usage, so it does not pay.
            settlement = replace(settlement, outcome=Outcome.FAILED, reply=None, response=None)
        self._unkept[settlement.request_id] = settlement
        raise SpoolFull(f"settlement {settlement.request_id} is neither in the ledger nor in the spool")

    async def _append_batch(self, batch: list[Settlement]) -> list[bool]:
        def append() -> tuple[int, int]:
            try:
                kept = self.spool.append_batch(batch)
            except SpoolFull as error:
                logger.error("%s", error)
                kept = 0
            return kept, self.spool.size  # read in this thread, because `size` may wait for the disk

        kept, self._spooled = await asyncio.to_thread(append)
        return [number < kept for number in range(len(batch))]

    def _count_outcome(self, outcome: str, started: float) -> None:
        self._metrics.add(metrics.SETTLEMENTS, 1, outcome)
        self._metrics.observe(metrics.SETTLEMENT_SECONDS, time.monotonic() - started)

    async def _replay_forever(self) -> None:
        while True:
            self._to_replay.clear()
            try:
                self._adopt(await asyncio.to_thread(self.spool.adopt_orphans))
                await self._send_unkept(self._settle_batch)
                await asyncio.to_thread(self._replay, asyncio.get_running_loop(), self._settle_batch)
                if not self._to_replay.is_set():
                    self._ledger_is_unavailable = False
            except Exception as error:
                logger.warning("the spool waits for the ledger: %s: %s", type(error).__name__, error)
                self._to_replay.set()
                await asyncio.sleep(REPLAY_S)
            await self._report_spool()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_S):
                    await self._to_replay.wait()

    async def _report_spool(self) -> None:
        waiting, size, age_s = await asyncio.to_thread(measure, self.spool)
        self._metrics.set(metrics.SPOOL_SETTLEMENTS, waiting, "gateway")
        self._metrics.set(metrics.SPOOL_BYTES, size, "gateway")
        self._metrics.set(metrics.SPOOL_AGE, age_s, "gateway")
        self._limiter.spool = SpoolState(waiting, size, age_s, self._ledger_is_unavailable)

    async def _send_unkept(self, send: Send) -> None:
        while self._unkept:
            batch = list(self._unkept.values())[:REPLAY_BATCH]
            await send(batch)
            for settlement in batch:
                del self._unkept[settlement.request_id]

    def _replay(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        def settle(batch: Sequence[Settlement]) -> Sequence[Settled | SettlementRejected]:
            # The spool replays in a separate thread, but calls to other processes must run on the event loop.
            return asyncio.run_coroutine_threadsafe(self._send(send, list(batch)), loop).result()

        try:
            self.spool.replay(settle, most=REPLAY_BATCH)
        finally:
            self._spooled = self.spool.size

    def _cancel_batch(self) -> None:
        """Cancels the spool's call in progress, so that its thread stops using the spool."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self, send: Send, batch: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        self._sending = asyncio.current_task()
        return await send(batch)

    async def _settle_batch(self, batch: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        if self._is_leaving:
            raise Unavailable("this gateway is stopping")
        # Bypasses `_calls`: a batch from the spool must not delay settlements that clients wait for.
        answers = await self._accounting.settle(batch)
        self._ledger_is_unavailable = False
        for settlement, answer in zip(batch, answers, strict=True):
            refused = settlement.request_id in self._unserved
            self._unserved.discard(settlement.request_id)
            settled = answer if isinstance(answer, Settled) else None
            self._limiter.release(release_of(settlement, settled, refused=refused))
        return answers

    def _adopt(self, found: Iterable[Settlement]) -> None:
        """Keeps the holds of dead gateways alive. For holds that the limiter still has, only the holder changes."""
        self._limiter.adopt([_hold_of(settlement) for settlement in found])


def release_of(settlement: Settlement, settled: Settled | None, *, refused: bool = False) -> Release:
    """Builds the message that releases a request's hold. Without `settled`, it carries no new balance."""
    return Release(
        request_id=settlement.request_id,
        prompt_tokens=settlement.prompt_tokens,
        completion_tokens=settlement.completion_tokens,
        account_id=settlement.account_id,
        balance=settled.balance if settled else None,
        version=settled.version if settled else None,
        refused=refused,
        key_id=settlement.key_id,
        key_spent=settled.key_spent if settled else None,
        key_period=settled.key_period if settled else None,
    )


def _hold_of(settlement: Settlement) -> OpenHold:
    price, reply = settlement.price, settlement.reply
    tokens = settlement.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens
    return OpenHold(
        request_id=settlement.request_id,
        account_id=settlement.account_id,
        key_id=settlement.key_id,
        hold=price.cost(*tokens),
        tokens_charged=settlement.prompt_tokens + settlement.completion_tokens,
        prompt_price=max(price.input, price.cached_input),
        output_price=price.output,
        max_tokens=settlement.completion_tokens,
        backend=settlement.backend,
        idempotency_key=None if reply is None else reply.idempotency_key,
        opened_at=settlement.started_at,
    )
