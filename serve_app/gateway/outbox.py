"""Settlements on their way to the ledger, and the replies in them: each arrives exactly once, whatever dies in between.

A settlement is repeated under its request id until the ledger has it. When the ledger stays away for longer than a
client can be kept waiting, the settlement is made durable in this gateway's own spool, the client gets its last chunk,
and the spool is replayed when the ledger is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from serve_app.gateway.adoption import Adoption
from serve_app.gateway.coalesce import Coalescer, Unavailable
from serve_app.gateway.ports import AccountingPort, LimiterClient, Metrics, SettleAnswer
from serve_app.gateway.shards import AccountingShards, shard_of
from serve_app.gateway.tasks import detached
from serve_app.ledger.errors import LedgerUnavailable, SpoolFull
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected, StoredReply
from serve_app.ledger.spool import Spool

logger = logging.getLogger("ray.serve")

RETRY_S = 0.1
REPLAY_S = 0.5
ADOPT_S = 1.0  # how long the spool of a gateway that died may lie unseen: its holds' leases must not run out before
FULL = 0.9  # of the spool's bound: what is left is for the requests that run already


class Outbox:
    """Settles usage for one gateway process."""

    def __init__(
        self,
        accounting: AccountingPort,
        spool: Spool,
        metrics: Metrics,
        leases: LimiterClient,
        *,
        settle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounting = accounting
        self._spool = spool
        self._spooled = spool.size
        self._unkept: set[str] = set()  # requests whose usage neither ledger nor spool has taken
        self._metrics = metrics
        self._adoption = Adoption(leases)
        self._clock = clock
        shards = accounting.shards if isinstance(accounting, AccountingShards) else (accounting,)
        self._calls: list[Coalescer[Settlement, SettleAnswer]] = [
            Coalescer(shard.settle, timeout_s=settle_timeout_s) for shard in shards
        ]
        self._to_replay = asyncio.Event()
        self._replaying: asyncio.Task[None] | None = None

    @property
    def settle_timeout_s(self) -> float:
        """How long a client's last chunk waits for the ledger, in seconds; may be set at any time."""
        return self._calls[0].timeout_s

    @settle_timeout_s.setter
    def settle_timeout_s(self, seconds: float) -> None:
        for calls in self._calls:
            calls.timeout_s = seconds

    @property
    def spool_max_bytes(self) -> int:
        """The spool's bound; may be set at any time."""
        return self._spool.max_bytes

    @spool_max_bytes.setter
    def spool_max_bytes(self, size: int) -> None:
        self._spool.max_bytes = size

    @property
    def is_full(self) -> bool:
        """Whether nothing may be admitted, because its usage could not be kept while the ledger is away."""
        return bool(self._unkept) or self._spooled > FULL * self._spool.max_bytes

    def start(self) -> None:
        """Replays what is in the spool, and what dead gateways left in theirs, from here on.

        Holds of what has been left are announced before this gateway asks for anything else.
        """
        self._adoption.take(self._spool.adopt_orphans())
        self._spooled = self._spool.size
        self._to_replay.set()
        self._replaying = detached(self._replay_forever())

    async def stop(self) -> None:
        """Ends the replaying; what is in the spool stays there for the next gateway."""
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.wait([self._replaying])

    async def settle(self, settlement: Settlement) -> Settled | None:
        """Returns when the usage is durable: in the ledger (Settled), or in the spool (None).

        Raises SpoolFull when neither could be had (then `is_full` until `settle_for_certain` has settled it), and
        RuntimeError when the ledger refuses the settlement for good.
        """
        started = self._clock()
        deadline = started + self.settle_timeout_s
        while True:
            try:
                # Not `wait_for`, which in Python 3.11 can swallow a cancellation.
                async with asyncio.timeout(max(0.01, deadline - self._clock())):
                    answer = await self._submit(settlement)
            except (Unavailable, TimeoutError) as error:
                if self._clock() + RETRY_S >= deadline:
                    logger.warning("ledger away (%s): settlement %s goes to the spool", error, settlement.request_id)
                    await asyncio.to_thread(self._keep, settlement)
                    self._to_replay.set()
                    self._metrics.settlement("spooled", self._clock() - started)
                    return None
                await asyncio.sleep(RETRY_S)
                continue
            if isinstance(answer, SettlementRejected):
                self._metrics.settlement("rejected", self._clock() - started)
                logger.critical("the ledger refuses %r: %s", settlement, answer.message)
                raise RuntimeError(f"the ledger refuses settlement {settlement.request_id}: {answer.message}")
            self._metrics.settlement(settlement.outcome.value, self._clock() - started)
            return answer

    async def settle_for_certain(self, settlement: Settlement) -> Settled | None:
        """Waits without end for a settlement that could not be made; None when the ledger refuses it for good."""
        while True:
            await asyncio.sleep(REPLAY_S)
            try:
                answer = await self._submit(settlement)
            except Unavailable:
                continue
            self._unkept.discard(settlement.request_id)
            return answer if isinstance(answer, Settled) else None

    async def find_reply(self, account_id: str, idempotency_key: str) -> StoredReply | None:
        """The reply that a settlement of the last 24 hours has stored.

        Raises Unavailable while the ledger is away: then nobody knows whether there is one.
        """
        try:
            async with asyncio.timeout(self.settle_timeout_s):
                wanted = {"account_id": account_id, "idempotency_key": idempotency_key}
                found: StoredReply | None = await self._accounting.call("find_reply", wanted)
                return found
        except (LedgerUnavailable, TimeoutError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from None

    async def _submit(self, settlement: Settlement) -> Settled | SettlementRejected:
        calls = self._calls[shard_of(settlement.account_id, len(self._calls))]
        answer = await calls.submit(settlement)
        if isinstance(answer, LedgerUnavailable):
            raise Unavailable(str(answer))
        return answer

    def _keep(self, settlement: Settlement) -> None:
        try:
            self._spool.append(settlement)
        except SpoolFull:
            self._unkept.add(settlement.request_id)
            # Where this usage can still be found if this process ends before the ledger is back.
            logger.critical("neither ledger nor spool took %r", settlement)
            raise
        finally:
            self._spooled = self._spool.size

    async def _replay_forever(self) -> None:
        while True:
            self._to_replay.clear()
            try:
                self._adoption.take(await asyncio.to_thread(self._spool.adopt_orphans))
                await asyncio.to_thread(self._replay, asyncio.get_running_loop())
            except Exception as error:
                logger.warning("the spool waits for the ledger: %s: %s", type(error).__name__, error)
                self._to_replay.set()
                await asyncio.sleep(REPLAY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_S):
                    await self._to_replay.wait()

    def _replay(self, loop: asyncio.AbstractEventLoop) -> None:
        def settle(batch: Sequence[Settlement]) -> Sequence[Settled | SettlementRejected]:
            # The spool works in a thread of its own; the call to the ledger belongs on the loop.
            return asyncio.run_coroutine_threadsafe(self._settle_batch(list(batch)), loop).result()

        try:
            self._spool.replay(settle)
        finally:
            self._spooled = self._spool.size

    async def _settle_batch(self, batch: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        async with asyncio.timeout(self.settle_timeout_s):
            answers = await self._accounting.settle(batch)
        settled: list[Settled | SettlementRejected] = []
        for answer in answers:
            if isinstance(answer, LedgerUnavailable):
                raise answer
            settled.append(answer)
        self._adoption.settled(settled)
        return settled
