"""Reports the load of one model replica to every limiter shard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.contracts.limiting import Heard, PressureReport
from serve_app.contracts.ports import LimiterPort
from serve_app.engine.port import EngineStats

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 2.0  # a report that takes longer is out of date


class PressureReporter:
    """Sends the reports of one replica. `limiter` returns the port of a shard by its index.

    The first shard's answer has the number of shards. Each shard's answer has the demand of its accounts that was
    refused under pressure, in tokens per second.
    """

    def __init__(self, backend: str, replica: str, limiter: Callable[[int], Awaitable[LimiterPort]]) -> None:
        self._backend = backend
        self._replica = replica
        self._limiter = limiter
        self._shards: dict[int, LimiterPort] = {}
        self._refused: dict[int, float] = {}  # shard → refused tokens per second
        self._arrived = True  # whether the last report arrived

    @property
    def refused_tokens_per_s(self) -> float:
        """The demand on this backend that was refused under pressure: the sum of the last answers of all shards."""
        return sum(self._refused.values())

    def report_of(self, stats: EngineStats) -> PressureReport:
        """Returns the report for these statistics."""
        return PressureReport(
            backend=self._backend,
            replica=self._replica,
            queue_age_s=stats.oldest_wait_s,
            kv_used=stats.kv_blocks_used / max(1, stats.kv_blocks_total),
            queued_prefill_tokens=stats.queued_prefill_tokens,
            waiting=stats.waiting,
            running=stats.running,
            tokens_done=stats.prompt_tokens + stats.tokens_produced,
        )

    async def send_report(self, stats: EngineStats) -> None:
        """Sends a report to every shard. Does not raise. A limiter that restarts gets the next report."""
        message = self.report_of(stats)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                shards = await self._report_to(0, message)
                others = [self._report_to(index, message) for index in range(1, shards)]
                await asyncio.gather(*others, return_exceptions=True)
            self._arrived = True
        except Exception as error:
            self._refused.clear()
            if self._arrived:
                logger.warning("the limiter does not receive this replica's reports: %s", error)
            self._arrived = False

    async def _report_to(self, index: int, message: PressureReport) -> int:
        """Sends a report to one shard. Returns the number of shards, according to this shard."""
        if index not in self._shards:
            self._shards[index] = await self._limiter(index)
        heard: object = None
        try:
            [heard] = await self._shards[index].ask([message])
        finally:
            self._refused[index] = heard.refused_tokens_per_s if isinstance(heard, Heard) else 0.0
        return heard.shards if isinstance(heard, Heard) else 1
