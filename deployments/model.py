"""The autoscaling model replica: Ray's side of serve_app.backend.Replica."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import AsyncGenerator

from ray import serve

from deployments.metrics import EngineMetrics
from deployments.ports import AccountingHandle
from deployments.pressure import PressureTeller
from serve_app.backend.dialect import Dialect
from serve_app.backend.messages import BackendEvent, GenerateCall
from serve_app.backend.replica import Replica
from serve_app.bundled import cache_dir, ensure_bundled_model
from serve_app.ledger.errors import LedgerUnavailable
from serve_app.ledger.messages import Settlement, SettlementRejected
from serve_app.settings import ModelArgs, home_dir

logger = logging.getLogger("ray.serve")

REPORT_S = 0.5

# The engine's thread waits so long for a loop that is busy handing out events, each time it wants to run Python again;
# Python's own 5 ms are a third of a step.
SWITCH_S = 0.0005
ORPHAN_TRIES = 60


@serve.deployment(
    name="Model",
    max_ongoing_requests=128,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=600,
    ray_actor_options={"num_cpus": 1},
)
class Model:
    """One engine with its weights."""

    def __init__(self, settings: ModelArgs) -> None:
        from serve_app.engine import Engine  # brings torch: only here, not where the application is built

        sys.setswitchinterval(SWITCH_S)
        if settings.model == "bundled":
            path = ensure_bundled_model(home_dir(), logger.info)
            cache = settings.cache_dir or str(cache_dir(home_dir()))
            settings = settings.model_copy(update={"model": str(path), "cache_dir": cache})
        self._engine = Engine.from_settings(settings, progress=logger.info)
        dialect = Dialect(self._engine.chat, settings.tool_format, settings.reasoning)
        self._replica = Replica(self._engine, self._settle_orphan, dialect=dialect)
        # What is there now stays: the collector need not look through it again and again in the middle of a step.
        gc.collect()
        gc.freeze()
        self._metrics = EngineMetrics()
        self._pressure = PressureTeller()
        self._report = asyncio.get_running_loop().create_task(self._report_forever())

    async def generate(self, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Streams one reply; see serve_app.backend.Replica."""
        # A cut stream ends here: without the `aclosing`, the engine would go on until a garbage collection.
        async with contextlib.aclosing(self._replica.generate(call)) as events:
            async for event in events:
                yield event

    async def fingerprint(self) -> str:
        """Of the weights: see serve_app.engine.loading.fingerprint."""
        return self._engine.fingerprint

    def check_health(self) -> None:
        """Fails when the engine's thread has died, so that Serve replaces the replica."""
        if not self._engine.is_alive:
            raise RuntimeError("the engine's thread has ended")

    async def _settle_orphan(self, settlement: Settlement) -> None:
        """Tries for a minute: Accounting may be restarting too."""
        for attempt in range(ORPHAN_TRIES):
            try:
                handle = await asyncio.to_thread(serve.get_deployment_handle, "Accounting", app_name="gateway")
                accounting = AccountingHandle(handle)
                [answer] = await accounting.settle([settlement])
                if isinstance(answer, LedgerUnavailable):
                    raise answer
                if isinstance(answer, SettlementRejected):
                    logger.error("the ledger refuses %r: %s", settlement, answer.message)
                return
            except Exception:
                if attempt == ORPHAN_TRIES - 1:
                    raise
                await asyncio.sleep(1)

    async def _report_forever(self) -> None:
        while True:
            stats = self._engine.stats()
            self._metrics.report(stats)
            await self._pressure.tell(stats)
            await asyncio.sleep(REPORT_S)

    async def __del__(self) -> None:
        """Settles cut streams, then ends the engine's thread."""
        self._report.cancel()
        await self._replica.drain()
        await asyncio.to_thread(self._engine.close)
