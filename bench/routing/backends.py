"""A model backend with each of the compared routers: ours, Serve's default, and other routers of Serve."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from deployments.model import Model
from deployments.routing import entered, router_of
from serve_app.settings import ModelArgs, parse

QUEUE = "capacity"
CAPACITY = DeploymentActorConfig(
    name=QUEUE,
    actor_class="ray.serve.experimental.capacity_queue:CapacityQueue",
    init_kwargs={"acquire_timeout_s": 1.0, "token_ttl_s": 60.0},
)


def router(name: str) -> RequestRouterConfig | None:
    """Returns the router with this name. Its module is imported only if it is used."""
    if name == "hash":
        return _config("bench.routing.session_router.SessionRouter")
    if name == "prefix":
        return _config("bench.routing.prefix_router.PrefixRouter", imbalanced_threshold=4)
    if name == "capacity":
        path = "ray.serve.experimental.capacity_queue_router.CapacityQueueRouter"
        return _config(path, capacity_queue_actor_name=QUEUE)
    return router_of(name)


def _config(path: str, **options: Any) -> RequestRouterConfig:
    return RequestRouterConfig(request_router_class=path, request_router_kwargs=options)


def model(args: dict[str, Any]) -> Application:
    """Builds the application. The configuration names this function. `router` is one of `service.ROUTERS`."""
    name = args["router"]
    settings = parse(ModelArgs, {key: value for key, value in args.items() if key != "router"}, "args")
    deployment = Model.options(deployment_actors=[CAPACITY] if name == "capacity" else None)  # type: ignore[attr-defined]
    return entered(deployment, settings, router(name))
