"""Usage accounting on Ray Serve: shards of one replica each, which write to one ledger.

Each account belongs to one shard, which commits the settlements of many requests together. The database serialises the
shards' writes.
"""

from __future__ import annotations

import logging
from typing import Any

from ray import serve

from deployments.direct_calls import ANSWERS_S, Server
from deployments.metrics import RayMetrics
from deployments.priority import yield_to_models
from deployments.transport import Address, own_host
from serve_app import __version__
from serve_app.accounting.accounting_service import AccountingService
from serve_app.accounting.ledger import Ledger
from serve_app.accounting.replies import ReplyQuota
from serve_app.contracts import metrics
from serve_app.contracts.books import Settlement
from serve_app.contracts.commands import Command
from serve_app.settings import GatewayArgs

logger = logging.getLogger("ray.serve")


@serve.deployment(
    name="Accounting",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Accounting:
    """The Serve deployment of AccountingService."""

    def __init__(self, settings: GatewayArgs, shard: int) -> None:
        logger.info("serve-app %s", __version__)
        yield_to_models()
        timeout_s = settings.database_timeout_s
        ledger = Ledger(
            settings.ledger_url(),
            wait_s=timeout_s / 2,
            timeout_s=timeout_s,
            currency=settings.currency,
            reply_quota=ReplyQuota(settings.stored_replies, settings.stored_reply_bytes),
        )
        counted = RayMetrics()
        counted.export_zeros([metrics.UNCOLLECTED, metrics.LEDGER_LAG])
        # All shards write to one ledger, so only the first one checks it.
        check_every_s = settings.books_check_s if shard == 0 else 0.0
        self._service = AccountingService(ledger, metrics=counted, check_every_s=check_every_s)
        self._service.start()
        self._server = Server(self._service.answer, own_host())

    async def address(self) -> Address:
        """Returns the address at which other processes reach this one without Serve."""
        return await self._server.address()

    def check_health(self) -> None:
        """Fails if a thread is stuck, so that Serve replaces the process. An unavailable database is no failure."""
        self._service.check_health()

    async def answer(self, message: list[Settlement] | Command[Any]) -> Any:
        return await self._service.answer(message)

    async def answer_replica(self, message: list[Settlement] | Command[Any]) -> Any:
        """Answers a call from a model replica. Replicas use only this method."""
        return await self._service.answer_replica(message)

    async def __del__(self) -> None:
        """Answers the open calls and commits the pending settlements."""
        await self._server.finish(ANSWERS_S)
        await self._service.close()
        self._server.close()
