"""Authentication, rate limits and balance holds on Ray Serve. One process decides on all requests of an account.

Each shard is a deployment with one replica. The hash of the account's id selects the shard.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.direct_calls import ANSWERS_S, Server
from deployments.handles import AccountingHandle
from deployments.metrics import RayMetrics
from deployments.priority import yield_to_models
from deployments.transport import Address, own_host
from serve_app import __version__
from serve_app.contracts import metrics
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.calls import boottime
from serve_app.contracts.limiting import RECOVERY_S
from serve_app.contracts.limits import Contract
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from serve_app.limiter.tenure import Tenure
from serve_app.settings import GatewayArgs, LimiterSettings, parse

logger = logging.getLogger("ray.serve")


@serve.deployment(
    name="Limiter",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    # Serve replaces the process after three failures in a row. So a process that does not answer is replaced within
    # about 15 s, before the default lease (20 s) expires.
    health_check_timeout_s=4,
    ray_actor_options={"num_cpus": 0},
)
class Limiter:
    def __init__(self, settings: GatewayArgs, accounting: list[DeploymentHandle], shard: int) -> None:
        logger.info("serve-app %s", __version__)
        yield_to_models()
        books = AccountingShards([AccountingHandle(one) for one in accounting], first=shard)
        admission = Admission(
            clock=boottime,
            rng=random.Random(),
            default_contract=Contract(),
            lease_s=settings.lease_s,
            recovery_s=RECOVERY_S,
        )
        counted = RayMetrics()
        counted.export_zeros(metrics.OF_LIMITERS, [{"shard": str(shard), "backend": metrics.NONE}])
        self._service = LimiterService(
            admission,
            books,
            shards=settings.limiter_shards,
            staleness_s=settings.key_staleness_s,
            metrics=counted,
            clock=boottime,
        )
        self._service.tenure = Tenure(
            self._service,
            books,
            shard=shard,
            shards=settings.limiter_shards,
            lasts_s=settings.limiter_lease_s + settings.outage_grace_s,
        )
        self._service.start()
        self._server = Server(self._service.ask, own_host())

    async def address(self) -> Address:
        """Returns the address at which other processes reach this one without Serve."""
        return await self._server.address()

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config`: the default contract for accounts, and the targets of pressure control."""
        settings = parse(LimiterSettings, config, "Limiter.user_config")
        self._service.admission.reconfigure(settings.contract, settings.pressure)

    def check_health(self) -> None:
        """Fails if the limiter's tasks are stuck, so that Serve replaces it. Waiting for the ledger is healthy."""
        if not self._service.is_alive:
            raise RuntimeError("a background task of the limiter has ended or hangs")

    async def answer(self, asks: Sequence[Any]) -> list[Any]:
        return await self._service.ask(asks)

    async def __del__(self) -> None:
        """Answers the open calls and stops the limiter, so that its successor can start at once."""
        await self._server.finish(ANSWERS_S)
        await self._service.stop()
        self._server.close()
