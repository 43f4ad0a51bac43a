"""The FastAPI ingress: binds Ray handles, settings and secrets to serve_app.gateway and serve_app.admin."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.applications import BackendApplications
from deployments.collector import collect_in_short_pauses, spare_lasting_objects
from deployments.handles import AccountingHandle, BackendHandles, ConsoleHandle, LimiterHandle, OtherGateways
from deployments.http_server import amend_http_server
from deployments.metrics import RayMetrics
from deployments.priority import yield_to_models
from deployments.transport import own_host
from serve_app import __version__, secret_files
from serve_app.admin.accounts import states_of
from serve_app.admin.auditing import record_prices
from serve_app.admin.endpoint import AdminServices
from serve_app.admin.for_console import run_for_console
from serve_app.admin.live import LiveQuery, live
from serve_app.admin.public import RECOMMENDED_TEMPERATURES, get_ready
from serve_app.admin.routes import admin_router, encoded_documents
from serve_app.api.doors import DOORS
from serve_app.api.errors import ApiError
from serve_app.contracts import calls, metrics
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.books import Audit, Settlement
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.offers import Front
from serve_app.contracts.served import Offer
from serve_app.contracts.spans import SpanExport
from serve_app.gateway.app import build_app
from serve_app.gateway.authentication import Authenticator
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.front import Page, front_routes, offers_of
from serve_app.gateway.lifecycle import Lifecycle
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.observer import Observer, log_line
from serve_app.gateway.record import RequestRecord
from serve_app.gateway.services import Services
from serve_app.gateway.settlements import Settlements
from serve_app.gateway.tracing import Tracing
from serve_app.model.orphans import Orphans, Seen, orphan_line
from serve_app.settings import GatewayArgs, GatewaySettings, IdentifierSettings, parse
from serve_app.storage.request_log import FOLDER, RequestLog, find_lines, recent_lines
from serve_app.storage.spool import ORPHANS, Spool
from serve_app.times import GATEWAY_STOPS_S

FINISH_S = 15.0  # time for background tasks to end; longer than a settlement takes to reach the ledger or the spool
BACKGROUND_S = 560.0  # time for responses that run in the background to end
CONSOLE = "console"  # the application's name
SETTLE_S = 5.0  # time for the ledger to accept the rest of the spool; then another gateway takes over the spool
HAND_OVER_S = 5.0

logger = logging.getLogger("ray.serve")


@serve.deployment(
    name="Gateway",
    num_replicas=1,
    max_ongoing_requests=2000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=GATEWAY_STOPS_S,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class Gateway:
    """One ingress process. Any number may run on a machine; Serve may start and stop them at any time."""

    def __init__(self, args: GatewayArgs, limiters: list[DeploymentHandle], accounting: list[DeploymentHandle]) -> None:
        logger.info("serve-app %s", __version__)
        yield_to_models()
        amend_http_server()
        self._metrics = RayMetrics()
        self._shares: dict[tuple[str, str], float] = {}  # last exported share by identifier and backend
        backends = self._backends = BackendHandles(own_host())
        self._console_handle = ConsoleHandle()
        ledger = self._ledger = AccountingShards([AccountingHandle(shard) for shard in accounting])
        keys = secret_files.load_secrets(args.state_dir())
        # Serve builds the app before it passes user_config. Requests arrive only after both.
        settings = GatewaySettings.model_construct(models={})
        holder = f"gateway-{uuid.uuid4().hex}"
        limiter = LimiterClient(
            [LimiterHandle(shard) for shard in limiters], holder, ledger, admit_timeout_s=settings.admit_timeout_s
        )
        spools = args.state_dir() / "spool"
        self._log = RequestLog(args.state_dir(), holder)
        # Also adopts the spools of dead replicas on this machine.
        self._orphans = Orphans(
            ledger.settle,
            Spool(spools, holder, suffix=ORPHANS, flushed=False),
            ledger.unsettled,
            settled=self._write_orphan,
            delay_s=args.orphan_delay_s,
        )
        spool = Spool(spools, holder, max_bytes=settings.spool_max_bytes)
        self._spans = SpanExport.of_environment("gateway")
        tracing = (
            None
            if self._spans is None
            else Tracing(
                self._spans, lambda: self._services.settings.trace_share, lambda: self._services.settings.trace_slow_s
            )
        )
        self._services = Services(
            settings=settings,
            catalogue=Catalogue(settings),
            limiter=limiter,
            settlements=Settlements(ledger, spool, self._metrics, limiter, settle_timeout_s=settings.settle_timeout_s),
            backends=backends,
            observer=Observer(self._metrics, self._targets, self._write_line, *([tracing] if tracing else [])),
            tracing=tracing,
            orphan_delay_s=args.orphan_delay_s,
        )
        self._lifecycle = Lifecycle(
            self._services, ledger, BackendApplications(), self._metrics, changed=self._export_catalogue
        )
        self._authenticator = Authenticator(limiter, operator_keys=keys.operator_keys)
        self._admin = AdminServices(
            self._authenticator,
            ledger,
            limiter,
            backends,
            self._lifecycle.status,
            catalogue=lambda: self._services.catalogue,
            secret_keys=keys.secret_keys,
            currency=args.currency,
            find_lines=partial(find_lines, args.state_dir() / FOLDER),
            recent_lines=partial(recent_lines, args.state_dir() / FOLDER),
            alert_mail=args.alert_mail,
            private_webhooks=args.private_webhooks,
            brand=args.brand,
            console=self._console_path,
        )

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config` to requests that begin from now on."""
        settings = parse(GatewaySettings, config, "Gateway.user_config")
        services = self._services
        services.settings = settings
        self._lifecycle.rebuild()
        services.limiter.admit_timeout_s = settings.admit_timeout_s
        services.settlements.settle_timeout_s = settings.settle_timeout_s
        services.settlements.spool.max_bytes = settings.spool_max_bytes
        self._authenticator.trusted_proxies = settings.trusted_proxies
        self._admin.queries.per_minute = settings.queries_per_minute
        record_prices(self._ledger, {name: model.price.per_token() for name, model in settings.models.items()})

    def _export_catalogue(self, catalogue: Catalogue) -> None:
        """Exports counters and histograms without values as 0, and the backends' shares of requests by identifier."""
        served = [(model, name) for model in catalogue.identifiers for name in catalogue.behind(model)]
        served.append((metrics.NONE, metrics.NONE))
        self._metrics.export_zeros(
            metrics.OF_GATEWAYS,
            [{"model": model, "backend": backend, "door": door.path} for model, backend in served for door in DOORS],
        )
        shares = dict.fromkeys(self._shares, 0.0)  # 0 for backends that were removed
        for model in catalogue.identifiers:
            weights = catalogue[model].backends
            shares |= dict.fromkeys(((model, name) for name in catalogue.behind(model)), 0.0)  # includes the fallback
            shares |= {(model, name): weight / sum(weights.values()) for name, weight in weights.items()}
        for (model, name), share in shares.items():
            self._metrics.set(metrics.BACKEND_WEIGHT, share, model, name)
        self._shares = shares

    def _targets(self, model: str) -> IdentifierSettings | None:
        catalogue = self._services.catalogue
        if model not in catalogue:
            return None
        return catalogue[model]

    def _write_orphan(self, settlement: Settlement, seen: Seen | None) -> None:
        if self._services.settings.request_log:
            self._log.write(orphan_line(settlement, seen, self._services.limiter.holder))

    def _write_line(self, record: RequestRecord) -> None:
        if self._services.settings.request_log:
            self._log.write(log_line(record))

    async def _is_ready(self) -> bool:
        try:
            await get_ready(self._admin)
        except ApiError:
            return False
        return True

    async def _describe(self) -> dict[str, Any]:
        return {"status": "ok" if await self._is_ready() else "degraded"}

    async def _front_page(self, base: str) -> Page | None:
        """Returns the page at `/`, rendered by the console; None if no console runs or it does not answer."""
        root = self._console_path()
        if root is None:
            return None
        offers = tuple(offers_of(self._services.catalogue, time.time()))
        return await self._console_handle.landing(
            Front(base, root, offers, self._admin.currency, await self._is_ready())
        )

    def _console_path(self) -> str | None:
        """Returns the console's path; None if no console runs."""
        root = self._backends.route_of(CONSOLE)
        return None if root is None else root.rstrip("/")

    def document(self) -> bytes:
        """Returns the operators' OpenAPI document, for the console."""
        return encoded_documents(self._services.catalogue).operators

    def identifiers(self) -> list[str]:
        """Returns the served model identifiers, for the console."""
        return list(self._services.catalogue.identifiers)

    def offers(self) -> list[Offer]:
        """Returns the served identifiers with their prices, for the console."""
        catalogue, now = self._services.catalogue, time.time()
        return [
            Offer(
                name,
                catalogue[name].context_length,
                catalogue[name].max_output,
                catalogue.price(name, now),
                dict(catalogue[name].recommended_temperatures or RECOMMENDED_TEMPERATURES.get(name, {"default": 1.0})),
            )
            for name in catalogue.identifiers
        ]

    async def live(self) -> dict[str, Any]:
        """Returns the live state, for the console's operators."""
        try:
            return (await live(self._admin, LiveQuery.model_validate({}))).model_dump()
        except ApiError as error:
            raise Unavailable(error.message) from None

    async def run_for_console(self, operation: str, given: Mapping[str, Any], audit: Audit | None) -> dict[str, Any]:
        """Runs a request of an operator from the console (`admin/for_console.py`)."""
        return await run_for_console(self._admin, operation, given, audit)

    async def status_of(self, account_id: str) -> AccountStatus:
        """Returns an account's limits and current holds, for the console."""
        try:
            [status] = await states_of(self._admin, (account_id,))
        except ApiError as error:
            raise Unavailable(error.message) from None
        return status

    async def take_over(self, settlements: list[Settlement]) -> bool:
        """Stores the settlements of a gateway that is stopping. Returns whether all of them are on this disk."""
        return await self._services.settlements.take_over(settlements)

    def check_health(self) -> None:
        """Fails if the gateway has no models to serve."""
        if not self._services.settings.models:
            raise RuntimeError("Gateway.user_config: missing; it names the models (see config.yaml)")

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app and starts its background tasks. Serve calls this once, after the constructor."""
        self._services.limiter.start()
        self._services.settlements.start()
        self._orphans.start()
        await self._lifecycle.start()
        spare_lasting_objects()
        collect_in_short_pauses()
        return build_app(
            self._services,
            self._authenticator,
            [admin_router(self._admin)],
            front=front_routes(self._describe, self._front_page),
            on_stop=self._finish,
            # Serve's middleware keeps or creates the request id and sets it on every response.
            tag_responses=False,
        )

    async def _finish(self) -> None:
        """Ends the background work and settles the remaining usage, before this process ends."""
        await self._services.background.stop(within_s=BACKGROUND_S)
        self._lifecycle.stop()
        await self._orphans.drain()
        is_done = await calls.wait_for_background(FINISH_S)
        # By now, the spool has all settlements that the ledger did not accept in time.
        settlements = self._services.settlements
        await settlements.stop(within_s=SETTLE_S)
        # Another gateway takes over the spool, because this disk may be deleted with the gateway.
        await settlements.hand_over(OtherGateways().take_over, HAND_OVER_S)
        if is_done:
            await settlements.close()
        self._backends.close()
        # This comes last: settlements left in the spool need their holds until another process adopts both.
        await self._services.limiter.stop()
        self._metrics.flush_metrics()
        await asyncio.to_thread(self._log.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
