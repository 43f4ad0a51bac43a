"""Authentication, rate limits and balance holds on Ray Serve: one process decides over all requests of an account.

Several shards are several deployments of one replica each, so that each can be addressed by the account's hash.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.ports import AccountingHandle
from deployments.priority import yield_to_models
from serve_app.gateway.direct import Server
from serve_app.gateway.limiter import LimiterService
from serve_app.limits import Admission
from serve_app.settings import GatewayArgs, LimiterSettings, parse

# A gateway may speak to this limiter's predecessor for line.TRUST_S yet, and then has two heartbeats to announce its
# open holds.
RECOVERY_S = 2.5


@serve.deployment(
    name="Limiter",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Limiter:
    """Ray's side of serve_app.gateway.limiter."""

    def __init__(self, settings: GatewayArgs, accounting: DeploymentHandle) -> None:
        yield_to_models()
        admission = Admission(
            clock=time.monotonic,
            rng=random.Random(),
            default_contract=LimiterSettings().default_contract(),
            lease_s=settings.lease_s,
            recovery_s=RECOVERY_S,
        )
        self._service = LimiterService(admission, AccountingHandle(accounting), shards=settings.limiter_shards)
        self._service.start()
        self._server = Server({"ask": self.ask})

    async def address(self) -> str | None:
        """Where processes of this machine reach this one without Serve; see serve_app.gateway.line."""
        return await self._server.address()

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config`: the contract of accounts that have none of their own, and what pressure aims at."""
        settings = parse(LimiterSettings, config, "Limiter.user_config")
        self._service.admission.shares.tuning = settings.pressure.tuning()
        self._service.admission.default_contract = settings.default_contract()

    def check_health(self) -> None:
        """Fails a limiter that no longer hears of revocations, so that Serve replaces it."""
        if not self._service.is_alive:
            raise RuntimeError("a background task of the limiter has ended")

    async def ask(self, asks: Sequence[Any]) -> list[Any]:
        """See LimiterService."""
        return await self._service.ask(asks)
