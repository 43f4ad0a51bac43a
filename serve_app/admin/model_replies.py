"""Replies about identifiers for operators: their backends, traffic and prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.admin.served import ServedView
from serve_app.admin.values import Count, Instant, PerMillion, Reply
from serve_app.contracts.money import PriceVersion, format_price
from serve_app.contracts.served import Traffic

Source = Literal["config.yaml", "ledger"]
Share = Annotated[float, Field(ge=0, le=1, description="Share of the identifier's requests.")]
Weights = Annotated[dict[str, Count], Field(description="Weights by backend.")]


class AdminBackend(Reply):
    """A backend behind an identifier."""

    name: str
    weight: Count
    share: Share
    status: str
    replicas: Count
    healthy: bool = Field(
        description="Whether it can take requests: a replica runs, or one starts with the first request."
    )
    ejected: bool = Field(description="The answering gateway sends it no requests, because too many have failed.")


class AdminPrice(Reply):
    """Current prices per million tokens."""

    input: str
    cached_input: str
    output: str


class AdminTraffic(Reply):
    """Weights, and the actor who set them."""

    version: Count
    weights: Weights = Field(description="Empty: the weights of `config.yaml` apply.")
    changed_at: Instant
    actor: str
    reason: str
    before: int | None = Field(description="Version that a rollback restores.")
    undoes: int | None = Field(description="For a rollback: the version that it reverted.")


class AdminModel(Reply):
    """An identifier, its backends and its price."""

    id: str
    source: Source = Field(description="Where the identifier is declared.")
    context_length: Count
    max_output: Count
    backends: list[AdminBackend]
    fallback: str | None = Field(description="Backend that replies while the others have no capacity.")
    aliases: list[str] = Field(description="Further names for clients.")
    price: AdminPrice
    traffic: AdminTraffic | None = Field(description="null: the weights of `config.yaml` apply.")
    rollback: Weights | None = Field(description="Weights that a rollback restores; null: there are none.")


class AdminModelList(Reply):
    """All identifiers."""

    data: list[AdminModel]


class AdminPriceVersion(Reply):
    """A price that a command set."""

    input: PerMillion
    cached_input: PerMillion
    output: PerMillion
    version: Count
    effective_at: Instant


class AdminModelDetails(AdminModel):
    """An identifier with its history."""

    first_token_target_s: float
    output_token_target_s: float
    recommended_temperatures: dict[str, float]
    sampling: dict[str, float] = Field(description="Defaults for parameters that a request omits.")
    history: list[AdminTraffic] = Field(description="Latest traffic changes, newest first.")
    prices: list[AdminPriceVersion] = Field(description="Past and future prices, newest version first.")


class Removed(Reply):
    """An identifier that is no longer served."""

    id: str


def described(view: ServedView, identifier: str) -> dict[str, Any]:
    """Returns the fields of AdminModel."""
    spec, weights = view.spec(identifier), view.weights(identifier)
    traffic, before = view.served.traffic.get(identifier), view.served.before.get(identifier)
    ejected, total = view.catalogue.availability.ejected, max(1, sum(weights.values()))
    return {
        "id": identifier,
        "source": "config.yaml" if view.is_configured(identifier) else "ledger",
        "context_length": spec.context_length,
        "max_output": spec.max_output,
        "backends": [
            {
                "name": name,
                "weight": weight,
                "share": weight / total,
                "status": view.state(name)["status"],
                "replicas": view.state(name)["replicas"],
                "healthy": view.is_ready(name),
                "ejected": (identifier, name) in ejected,
            }
            for name, weight in weights.items()
        ],
        "fallback": spec.fallback,
        "aliases": list(spec.aliases),
        "price": _price(view, identifier),
        "traffic": None if traffic is None else traffic_reply(traffic),
        "rollback": None if before is None else dict(before.weights),
    }


def _price(view: ServedView, identifier: str) -> dict[str, str]:
    """Returns the price. If it comes from `config.yaml`, it is written as in that file."""
    price, settings = view.price(identifier), view.catalogue.configured.get(identifier)
    if settings is not None and price == settings.price.per_token():
        return settings.price.model_dump()
    return {name: format_price(value) for name, value in asdict(price).items()}


def traffic_reply(row: Traffic) -> AdminTraffic:
    return AdminTraffic.model_validate({name: getattr(row, name) for name in AdminTraffic.model_fields})


def price_reply(one: PriceVersion) -> AdminPriceVersion:
    return AdminPriceVersion.from_fields(one.price, version=one.version, effective_at=one.effective_at)
