"""Endpoints that shift traffic between the backends of an identifier. They require the operator key.

Each change names the traffic version that it replaces, so a concurrent change causes an error and is not overwritten.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.model_replies import AdminModel, described
from serve_app.admin.served import ServedView, check_ready
from serve_app.admin.traffic_shares import OnlyBackend, with_share
from serve_app.admin.values import Body, example
from serve_app.api import errors
from serve_app.contracts import served_commands as commands
from serve_app.contracts.books import Audit
from serve_app.contracts.served import raised

endpoint = Endpoints("Operator: Models", "operatorKey")

_Backend = Annotated[str, Field(min_length=1, max_length=100)]
_ONE: Final = "/admin/models/{id}"
_SUCCESS: Final = "The identifier with its new weights."


class TrafficChange(Body):
    """Fields that every traffic change accepts."""

    reason: Annotated[str, Field(max_length=500)] = Field("", description="Reason, for the history.")
    expected: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Version of the traffic to replace; 0: the weights of `config.yaml`; null: any version."
    )


class NewWeights(TrafficChange):
    """New weights of all backends."""

    model_config = example(weights={"chat-v1": 90, "chat-v2": 10}, reason="Compare chat-v2")

    weights: Annotated[dict[_Backend, Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=100)] = Field(
        description="Weights by backend. Empty: restore the weights of `config.yaml`."
    )


class Canary(TrafficChange):
    """A backend's share of the requests."""

    model_config = example(backend="chat-v2", share=5, reason="Try chat-v2")

    backend: _Backend
    share: Annotated[float, Field(ge=0, le=100)] = Field(description="Percentage of the requests.")


class Promotion(TrafficChange):
    """The backend that gets all requests."""

    model_config = example(backend="chat-v2", reason="chat-v2 is as fast as chat-v1")

    backend: _Backend


class Rollback(TrafficChange):
    """The reason for the rollback."""

    model_config = example(reason="chat-v2 fails more often")


@endpoint(
    "POST",
    f"{_ONE}/canary",
    "Give a backend a share of the requests",
    success=_SUCCESS,
    operation_id="setCanary",
)
async def set_canary(admin: AdminServices, id: str, body: Canary, audit: Audit) -> AdminModel:
    """The other backends divide the rest as before. A backend that gets more requests than before must be ready."""
    view = await _read(admin, id)
    try:
        weights = with_share(view.weights(id), body.backend, body.share)
    except OnlyBackend:
        raise errors.invalid_parameters(
            f"share: no other backend of {id} would get the rest: give 100, or promote it", param="share"
        ) from None
    return await _set(admin, view, id, weights, body, audit)


@endpoint("POST", f"{_ONE}/promote", "Give a backend all requests", success=_SUCCESS, operation_id="promoteBackend")
async def promote_backend(admin: AdminServices, id: str, body: Promotion, audit: Audit) -> AdminModel:
    """The backend must be ready. A rollback restores the weights from before the roll-out."""
    view = await _read(admin, id)
    return await _set(admin, view, id, {body.backend: 100}, body, audit)


@endpoint("POST", f"{_ONE}/traffic", "Set the weights of all backends", success=_SUCCESS, operation_id="setTraffic")
async def set_traffic(admin: AdminServices, id: str, body: NewWeights, audit: Audit) -> AdminModel:
    """A backend that is not named gets no requests. One that gets more requests than before must be ready."""
    view = await _read(admin, id)
    return await _set(admin, view, id, body.weights, body, audit)


@endpoint(
    "POST",
    f"{_ONE}/rollback",
    "Restore the weights from before the roll-out",
    success=_SUCCESS,
    operation_id="rollBackTraffic",
)
async def roll_back(admin: AdminServices, id: str, body: Rollback, audit: Audit) -> AdminModel:
    """A second rollback goes back one more roll-out. At least one of the backends to restore must be ready."""
    view = await _read(admin, id)
    before = view.served.before.get(id)
    if not view.traffic_version(id):
        raise errors.invalid_parameters(f"nothing to roll back: the weights of config.yaml apply to {id}", param="id")
    if before is not None and not any(map(view.is_ready, before.weights)):
        raise errors.invalid_parameters(f"none of the backends to restore is ready: {', '.join(before.weights)}")
    expected = view.traffic_version(id) if body.expected is None else body.expected
    await admin.run(commands.RollBackTraffic(id, expected, body.reason, audit))
    return AdminModel.model_validate(described(await ServedView.read(admin), id))


async def _read(admin: AdminServices, identifier: str) -> ServedView:
    view = await ServedView.read(admin)
    view.check_identifier(identifier)
    return view


async def _set(
    admin: AdminServices, view: ServedView, identifier: str, weights: dict[str, int], body: TrafficChange, audit: Audit
) -> AdminModel:
    if any(weights.values()):
        check_ready(view, raised(weights, view.weights(identifier)))
    expected = view.traffic_version(identifier) if body.expected is None else body.expected
    configured = view.configured_weights(identifier)
    await admin.run(commands.SetTraffic(identifier, weights, body.reason, expected, configured, audit))
    return AdminModel.model_validate(described(await ServedView.read(admin), identifier))
