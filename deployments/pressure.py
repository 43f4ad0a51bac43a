"""A model replica tells every limiter shard how much it has to do."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ray import serve

from deployments.ports import LimiterHandle
from serve_app.gateway.shards import shard_name
from serve_app.limits.messages import PressureReport

if TYPE_CHECKING:
    from serve_app.engine import EngineStats

logger = logging.getLogger("ray.serve")

GATEWAY_APP = "gateway"
TELL_TIMEOUT_S = 2.0  # a report that takes longer is old


class PressureTeller:
    """One replica's reports. The first shard's answer tells how many there are."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._backend = context.app_name
        self._replica = context.replica_id.unique_id
        self._shards: list[LimiterHandle] = []
        self._is_heard = True

    async def tell(self, stats: EngineStats) -> None:
        """Never raises: a limiter that restarts hears the next report."""
        report = PressureReport(
            backend=self._backend,
            replica=self._replica,
            queue_age_s=stats.oldest_wait_s,
            kv_used=stats.kv_blocks_used / max(1, stats.kv_blocks_total),
            queued_prefill_tokens=stats.queued_prefill_tokens,
            waiting=stats.waiting,
            running=stats.running,
            tokens_done=stats.prompt_tokens + stats.tokens_produced,
        )
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                count = await self._tell(0, report)
                if count > 1:
                    others = [self._tell(index, report) for index in range(1, count)]
                    await asyncio.gather(*others, return_exceptions=True)
            self._is_heard = True
        except Exception as error:
            if self._is_heard:
                logger.warning("the limiter does not hear of this replica's pressure: %s", error)
            self._is_heard = False

    async def _tell(self, index: int, report: PressureReport) -> int:
        while len(self._shards) <= index:
            name = shard_name("Limiter", len(self._shards))
            # Asks the controller, and blocks.
            handle = await asyncio.to_thread(serve.get_deployment_handle, name, app_name=GATEWAY_APP)
            self._shards.append(LimiterHandle(handle))
        [count] = await self._shards[index].ask([report])
        return count if isinstance(count, int) else 1
