"""Builders of the Serve applications, named by `import_path` in config.yaml."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from serve_app.contracts.calls import shard_name
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
    return routing.routed(Model.options(ray_actor_options=_resources(settings)), settings)  # type: ignore[attr-defined]


def backend(args: dict[str, Any], options: dict[str, Any], version: str) -> Application:
    """Builds a model backend of the ledger with the deployment's `options`. A new version replaces the replicas."""
    from deployments import routing
    from deployments.model import Model

    settings = parse(ModelArgs, args, "args")
    resources = _resources(settings) | options.get("ray_actor_options", {})
    deployment = Model.options(  # type: ignore[attr-defined]
        **{**options, "ray_actor_options": resources}, version=version, _internal=True
    )
    return routing.routed(deployment, settings)


def _resources(settings: ModelArgs) -> dict[str, Any]:
    from deployments.model import RESOURCES

    # A config file's ray_actor_options replace these. `Model` reports it if that was a mistake.
    python = settings.python()
    return RESOURCES if python is None else RESOURCES | {"runtime_env": {"py_executable": python}}
