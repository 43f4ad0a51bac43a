"""The FastAPI ingress: binds Ray handles, settings and secrets to serve_app.gateway."""

from __future__ import annotations

import random
import uuid
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.metrics import GatewayMetrics
from deployments.ports import AccountingHandle, BackendHandles, LimiterHandle
from deployments.priority import yield_to_models
from serve_app import secrets
from serve_app.gateway import tasks
from serve_app.gateway.app import build_app
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.exchange import Services
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.leases import Leases
from serve_app.gateway.operations import Operations
from serve_app.gateway.outbox import Outbox
from serve_app.gateway.shards import AccountingShards, LimiterShards
from serve_app.ledger.spool import Spool
from serve_app.settings import GatewayArgs, GatewaySettings, parse

FINISH_S = 15.0  # longer than a settlement takes to reach the ledger or the spool


@serve.deployment(
    name="Gateway",
    num_replicas=1,
    max_ongoing_requests=2000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=600,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class Gateway:
    """One ingress process. Any number of them may run."""

    def __init__(self, args: GatewayArgs, limiters: list[DeploymentHandle], accounting: list[DeploymentHandle]) -> None:
        yield_to_models()
        backends, metrics = BackendHandles(), GatewayMetrics()
        self._metrics = metrics
        ledger = AccountingShards([AccountingHandle(shard) for shard in accounting])
        keys = secrets.load(args.state_dir())
        # Serve builds the app before it hands over user_config; no request comes before both.
        settings = GatewaySettings.model_construct(models={})
        holder = f"gateway-{uuid.uuid4().hex}"
        spool = Spool(args.state_dir() / "spool", holder, max_bytes=settings.spool_max_bytes)
        self._leases = LimiterShards(
            [Leases(LimiterHandle(shard), holder, admit_timeout_s=settings.admit_timeout_s) for shard in limiters],
            ledger,
        )
        catalogue = Catalogue(settings, random.Random())
        self._services = Services(
            settings=settings,
            catalogue=catalogue,
            leases=self._leases,
            outbox=Outbox(ledger, spool, metrics, self._leases, settle_timeout_s=settings.settle_timeout_s),
            backends=backends,
            metrics=metrics,
            orphan_delay_s=args.orphan_delay_s,
        )
        self._operations = Operations(
            ledger, self._leases, backends, catalogue, key_secret=keys.key_secret, currency=args.currency
        )
        self._authenticator = Authenticator(self._leases, key_secret=keys.key_secret, operator_key=keys.operator_key)

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config` to requests that begin from now on."""
        settings = parse(GatewaySettings, config, "Gateway.user_config")
        services = self._services
        services.settings = settings
        services.catalogue = self._operations.catalogue = Catalogue(settings, random.Random())
        self._leases.admit_timeout_s = settings.admit_timeout_s
        services.outbox.settle_timeout_s = settings.settle_timeout_s
        services.outbox.spool_max_bytes = settings.spool_max_bytes
        self._authenticator.trusted_proxies = settings.trusted_proxies

    def check_health(self) -> None:
        """Fails a gateway that was never told which models it serves."""
        if not self._services.catalogue.identifiers:
            raise RuntimeError("Gateway.user_config: missing; it names the models (see config.yaml)")

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called once by Serve, after the constructor."""
        self._leases.start()
        self._services.outbox.start()
        return build_app(
            self._services,
            self._authenticator,
            self._operations,
            on_stop=self._finish,
            # Serve's own middleware keeps or makes the request id and sets it on every response.
            tag_responses=False,
        )

    async def _finish(self) -> None:
        """Settles what clients that went away have used, before this process ends."""
        await self._services.outbox.stop()
        await tasks.finished(FINISH_S)
        # Last: whatever is left in the spool has its holds until this process ends and another takes both over.
        await self._leases.stop()
        self._metrics.flush()
