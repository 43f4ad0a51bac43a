"""The builders that config.yaml imports. The only module of serve_app that knows Ray."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from serve_app.settings import GatewayArgs, ModelArgs, parse


def gateway(args: dict[str, Any]) -> Application:
    """The application that clients talk to: Gateway over Limiter and Accounting."""
    from deployments.accounting import Accounting
    from deployments.gateway import Gateway
    from deployments.limiter import Limiter

    settings = parse(GatewayArgs, args, "args")
    accounting = Accounting.bind(settings)  # type: ignore[attr-defined]
    limiter = Limiter.bind(settings, accounting)  # type: ignore[attr-defined]
    return Gateway.bind(settings, limiter, accounting)  # type: ignore[attr-defined]


def model(args: dict[str, Any]) -> Application:
    """One model backend."""
    from deployments.model import Model

    return Model.bind(parse(ModelArgs, args, "args"))  # type: ignore[attr-defined]
