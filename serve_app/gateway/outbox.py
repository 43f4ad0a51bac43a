"""Settlements on their way to the ledger: each arrives exactly once, whatever dies in between.

A settlement is repeated under its request id until the ledger has it. When the ledger stays away for longer than a
client can be kept waiting, the settlement is made durable in this gateway's own spool, the client gets its last chunk,
and the spool is replayed when the ledger is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from serve_app.gateway.coalesce import Coalescer, Unavailable
from serve_app.gateway.ports import AccountingPort, Metrics
from serve_app.gateway.tasks import detached
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected
from serve_app.ledger.spool import Spool

logger = logging.getLogger("ray.serve")

RETRY_S = 0.1
REPLAY_S = 0.5


class Outbox:
    """Settles usage for one gateway process."""

    def __init__(
        self,
        accounting: AccountingPort,
        spool: Spool,
        metrics: Metrics,
        *,
        settle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounting = accounting
        self._spool = spool
        self._metrics = metrics
        self._clock = clock
        self.settle_timeout_s = settle_timeout_s
        self._calls: Coalescer[Settlement, Settled | SettlementRejected] = Coalescer(
            accounting.settle, timeout_s=settle_timeout_s
        )
        self._replay: asyncio.Task[None] | None = None

    async def settle(self, settlement: Settlement) -> Settled | None:
        """Returns when the usage is durable: in the ledger (Settled), or in the spool (None).

        Raises SpoolFull when neither could be had, and RuntimeError when the ledger refuses the settlement for good.
        """
        started = self._clock()
        deadline = started + self.settle_timeout_s
        while True:
            try:
                answer = await asyncio.wait_for(self._calls.submit(settlement), max(0.01, deadline - self._clock()))
            except (Unavailable, TimeoutError) as error:
                if self._clock() + RETRY_S >= deadline:
                    logger.warning("ledger away (%s): settlement %s goes to the spool", error, settlement.request_id)
                    await asyncio.to_thread(self._spool.append, settlement)
                    self.replay_soon()
                    self._metrics.settlement("spooled", self._clock() - started)
                    return None
                await asyncio.sleep(RETRY_S)
                continue
            if isinstance(answer, SettlementRejected):
                self._metrics.settlement("rejected", self._clock() - started)
                raise RuntimeError(f"the ledger refuses settlement {settlement.request_id}: {answer.message}")
            self._metrics.settlement(settlement.outcome.value, self._clock() - started)
            return answer

    async def settle_for_certain(self, settlement: Settlement) -> Settled | None:
        """Waits without end for a settlement that is safe in the spool; None when the ledger refuses it for good."""
        while True:
            await asyncio.sleep(REPLAY_S)
            try:
                answer = await self._calls.submit(settlement)
            except Unavailable:
                continue
            return answer if isinstance(answer, Settled) else None

    def replay_soon(self) -> None:
        """Starts replaying the spool in the background, unless that is under way."""
        if self._replay is None or self._replay.done():
            self._replay = detached(self._replay_until_empty())

    async def _replay_until_empty(self) -> None:
        loop = asyncio.get_running_loop()

        def settle(batch: Sequence[Settlement]) -> Sequence[Settled | SettlementRejected]:
            # The spool works in a thread of its own; the call to the ledger belongs on the loop.
            future = asyncio.run_coroutine_threadsafe(self._settle_batch(list(batch)), loop)
            return future.result()

        await asyncio.to_thread(self._spool.adopt_orphans)
        while await asyncio.to_thread(self._spool.pending):
            try:
                await asyncio.to_thread(self._spool.replay, settle)
            except Exception as error:
                logger.warning("the spool waits for the ledger: %s: %s", type(error).__name__, error)
                await asyncio.sleep(REPLAY_S)

    async def _settle_batch(self, batch: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        async with asyncio.timeout(self.settle_timeout_s):
            return await self._accounting.settle(batch)
