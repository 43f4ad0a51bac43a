"""Builders of the Serve applications, named by `import_path` in config.yaml."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from serve_app.contracts.calls import shard_name
from serve_app.engine.engines import ENGINES
from serve_app.settings import ConsoleArgs, GatewayArgs, ModelArgs, parse


def gateway(args: dict[str, Any]) -> Application:
    """Builds the application that clients talk to: Gateway, Limiter, Accounting."""
    from deployments.accounting import Accounting
    from deployments.gateway import Gateway
    from deployments.limiter import Limiter

    settings = parse(GatewayArgs, args, "args")
    accounting = [
        Accounting.options(name=shard_name("Accounting", index)).bind(settings, index)  # type: ignore[attr-defined]
        for index in range(settings.accounting_shards)
    ]
    limiters = [
        Limiter.options(name=shard_name("Limiter", index)).bind(settings, accounting, index)  # type: ignore[attr-defined]
        for index in range(settings.limiter_shards)
    ]
    return Gateway.bind(settings, limiters, accounting)  # type: ignore[attr-defined]


def console(args: dict[str, Any]) -> Application:
    """Builds the web console of the gateway's application."""
    from deployments.console import ConsoleIngress

    return ConsoleIngress.bind(parse(ConsoleArgs, args, "args"))  # type: ignore[attr-defined]


def model(args: dict[str, Any]) -> Application:
    """Builds one model backend."""
    from deployments import routing
    from deployments.model import Model

    settings = parse(ModelArgs, args, "args")
    return routing.routed(Model.options(**_options(settings)), settings)  # type: ignore[attr-defined]


def backend(args: dict[str, Any], options: dict[str, Any], version: str) -> Application:
    """Builds a model backend that the ledger lists, with the deployment's `options`.

    Serve replaces the replicas if `version` differs from the running one.
    """
    from deployments import routing
    from deployments.model import Model

    settings = parse(ModelArgs, args, "args")
    own = _options(settings)
    resources = own["ray_actor_options"] | options.get("ray_actor_options", {})
    deployment = Model.options(  # type: ignore[attr-defined]
        **{**own, **options, "ray_actor_options": resources}, version=version, _internal=True
    )
    return routing.routed(deployment, settings)


def _options(settings: ModelArgs) -> dict[str, Any]:
    """Returns the deployment's options that follow from the settings. Options in a config file replace them."""
    from deployments.model import RESOURCES

    python = settings.python()
    resources = RESOURCES if python is None else RESOURCES | {"runtime_env": {"py_executable": python}}
    # The replica also takes the calls that wait, because accounts do not take turns in the queues of Serve's routers.
    calls = ENGINES[settings.engine].max_running(settings) + settings.max_waiting
    return {"ray_actor_options": resources, "max_ongoing_requests": calls}
