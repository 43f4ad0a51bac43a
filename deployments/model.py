"""The model replica as a deployment: an engine, and handles to limiter and accounting."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group

from deployments.collector import spare_lasting_objects
from deployments.handles import LimiterHandle, ReplicaAccountingHandle
from deployments.metrics import RayMetrics
from deployments.reply_lines import ReplyTo, send_events
from serve_app import __version__, secret_files
from serve_app.contracts import metrics
from serve_app.contracts.books import Settlement
from serve_app.contracts.calls import shard_name
from serve_app.contracts.generation import GenerateCall, Rejected, TokenizeCall, Tokenized
from serve_app.contracts.ports import SettleAnswer
from serve_app.contracts.spans import SpanExport
from serve_app.engine.engines import ENGINES
from serve_app.engine.port import EnginePort
from serve_app.model.bundled import bundled_cache_dir, ensure_bundled_model
from serve_app.model.dialect import Dialect
from serve_app.model.engine_counts import EngineCounts
from serve_app.model.orphans import Orphans, orphan_line
from serve_app.model.pressure_reports import PressureReporter
from serve_app.model.replica import Replica
from serve_app.model.warm_up import warm_up
from serve_app.scaling.signals import LoadMeter, ReplicaLoad
from serve_app.settings import ModelArgs, ModelSettings, home_dir, parse
from serve_app.storage.request_log import RequestLog
from serve_app.storage.spool import ORPHANS, Spool, measure
from serve_app.times import MODEL_STOPS_S

logger = logging.getLogger("ray.serve")

REPORT_S = 0.5  # between two reports of the load
SAMPLES_EVERY = 10  # reports per export of the engine's samples: every 5 s is enough, because Ray exports every 10 s
RESOURCES = {"num_cpus": 1}

# Maximum seconds for which the engine's thread waits for the interpreter lock while the event loop is busy (Python's
# switch interval). The default of 5 ms is a third of a step.
SWITCH_S = 0.0005


def start_engine(settings: ModelArgs) -> EnginePort:
    """Starts the configured engine on the resources that Ray has assigned to this process. Raises ModelError."""
    gpus = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
    on_nodes = get_current_placement_group() is not None
    return ENGINES[settings.engine].start(settings, settings.options, gpus, on_nodes, logger.info)


async def settle(settlements: list[Settlement]) -> Sequence[SettleAnswer]:
    """Settles interrupted calls in the gateway's application."""
    return await ReplicaAccountingHandle(await _gateway_handle("Accounting")).settle(settlements)


async def unsettled(request_ids: tuple[str, ...]) -> list[str]:
    """Returns the ids that the ledger has neither settled nor kept as stuck."""
    return await ReplicaAccountingHandle(await _gateway_handle("Accounting")).find_unsettled(request_ids)


async def _limiter(shard: int) -> LimiterHandle:
    return LimiterHandle(await _gateway_handle(shard_name("Limiter", shard)))


async def _gateway_handle(deployment: str) -> DeploymentHandle:
    # The call blocks on Serve's controller.
    return await asyncio.to_thread(serve.get_deployment_handle, deployment, app_name="gateway")


@serve.deployment(
    name="Model",
    # When `args` change, Serve starts new replicas alongside the old ones. The old replicas stop only after the new
    # ones are healthy. This needs spare capacity; without it, the new replicas wait. With Serve's default, the old
    # replicas would stop first.
    max_surge_percent=100,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=MODEL_STOPS_S,
    ray_actor_options=RESOURCES,
)
class Model:
    """One engine with its weights."""

    async def __init__(self, settings: ModelArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._report: asyncio.Task[None] | None = None  # set at the end of this constructor
        logger.info("serve-app %s", __version__)
        secret_files.forget_environment()  # on one machine, Ray passes the service's secrets to all processes
        sys.setswitchinterval(SWITCH_S)
        if settings.model == "bundled":
            path = await asyncio.to_thread(ensure_bundled_model, home_dir(), logger.info)
            cache = settings.cache_dir or str(bundled_cache_dir(home_dir()))
            settings = settings.model_copy(update={"model": str(path), "cache_dir": cache})
        began = time.monotonic()
        self._engine = await asyncio.to_thread(start_engine, settings)  # may take minutes
        load_s = time.monotonic() - began
        logger.info("The model was loaded in %.1f s.", load_s)
        dialect = Dialect(self._engine.chat, settings.tool_format, settings.reasoning)
        # The replica is healthy and receives requests once this constructor has returned.
        await warm_up(self._engine, dialect)
        logger.info("The first reply took %.1f s.", time.monotonic() - began - load_s)
        process = f"replica-{uuid.uuid4().hex}"
        self._log = RequestLog(home_dir(), process)
        self._spool = Spool(home_dir() / "spool", process, suffix=ORPHANS, flushed=False)
        self._orphans = Orphans(
            settle, self._spool, unsettled, settled=lambda one, seen: self._log.write(orphan_line(one, seen, process))
        )
        self._orphans.start()
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        self._spans = SpanExport.of_environment("model")
        self._replica = Replica(
            self._engine, settle, orphans=self._orphans, dialect=dialect, name=name, spans=self._spans
        )
        spare_lasting_objects()
        self._metrics = RayMetrics()
        self._metrics.set(metrics.LOAD_SECONDS, load_s)
        self._metrics.set(metrics.REPLICA_COST, settings.cost_per_hour)
        self._counts = EngineCounts(self._metrics)
        self._pressure = PressureReporter(context.app_name, name, _limiter)
        self._meter = LoadMeter(self._engine.max_running)
        self._load = ReplicaLoad(slots=self._engine.max_running)
        self._report = asyncio.get_running_loop().create_task(self._report_forever())

    async def reply(self, call: GenerateCall, to: ReplyTo) -> str | None:
        """Sends the events of a reply to the gateway. Returns the reason if it ended early, else None."""
        return await send_events(self._replica.generate(call), to)

    async def tokenize(self, call: TokenizeCall) -> Tokenized | Rejected:
        return await self._replica.tokenize(call)

    async def fingerprint(self, adapter: str = "") -> str:
        return self._engine.fingerprint_of(adapter) if adapter else self._engine.fingerprint

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Applies `user_config`: begins to load and unload adapters while requests run.

        Does not wait for the adapters: until this returns, Serve might send the replica no requests and not check its
        health.
        """
        self._engine.set_adapters(parse(ModelSettings, config, "Model.user_config").adapters)

    def check_health(self) -> None:
        """Fails if the engine hangs or has lost its thread or its device, so that Serve replaces the replica."""
        self._engine.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load for the policy in deployments/autoscaling.py. Serve calls it every `metrics_interval_s`."""
        return self._load.metrics()

    def record_routing_stats(self) -> dict[str, int]:
        """Returns the load for deployments/routing.py. Serve calls it every `request_routing_stats_period_s`."""
        return self._load.routing_stats()

    async def _report_forever(self) -> None:
        for number in itertools.count():
            stats = self._engine.stats()
            self._counts.export(stats)
            if number % SAMPLES_EVERY == 0:
                self._counts.export_samples(self._engine.samples())
            waiting, size, age_s = await asyncio.to_thread(measure, self._spool)
            self._metrics.set(metrics.SPOOL_SETTLEMENTS, waiting, "replica")
            self._metrics.set(metrics.SPOOL_BYTES, size, "replica")
            self._metrics.set(metrics.SPOOL_AGE, age_s, "replica")
            await self._pressure.send_report(stats)
            refused = self._pressure.refused_tokens_per_s
            self._load = self._meter.take(self._pressure.report_of(stats), refused, time.monotonic())
            await asyncio.sleep(REPORT_S)

    async def __del__(self) -> None:
        """Settles interrupted streams, then ends the engine's thread."""
        if self._report is None:  # the replica is still loading; the engine ends with the process
            return
        self._report.cancel()
        await self._replica.drain()
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._log.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
