"""Replies about identifiers for operators: their backends, traffic and prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.admin.served import ServedView
from serve_app.admin.values import BackendName, Count, Instant, ModelId, PerMillion, Reply
from serve_app.contracts.money import PriceVersion, format_price
from serve_app.contracts.served import Traffic

Source = Literal["config.yaml", "ledger"]
Share = Annotated[float, Field(ge=0, le=1, description="Share of the identifier's requests.", examples=[1.0])]
Weights = Annotated[dict[str, Count], Field(description="Weights by backend.", examples=[{"chat-v1": 100}])]


class AdminBackend(Reply):
    """A backend behind an identifier."""

    name: BackendName
    weight: Count = Field(examples=[100])
    share: Share
    status: str = Field(
        description="Status of the Ray Serve application; MISSING: Serve has no such application.",
        examples=["RUNNING"],
    )
    replicas: Count = Field(examples=[2])
    healthy: bool = Field(
        description="Whether it can take requests: a replica runs, or one starts with the first request."
    )
    ejected: bool = Field(
        description="The answering gateway sends it no requests, because too many have failed.", examples=[False]
    )


class AdminPrice(Reply):
    """Current prices per million tokens."""

    input: str = Field(examples=["0.27"])
    cached_input: str = Field(examples=["0.07"])
    output: str = Field(examples=["1.10"])


class AdminTraffic(Reply):
    """Weights, and the actor who set them."""

    version: Count = Field(examples=[7])
    weights: Weights = Field(description="Empty: the weights of `config.yaml` apply.")
    changed_at: Instant
    actor: str = Field(examples=["kim key:9f86d081884c"])
    reason: str = Field(examples=["chat-v1 is ready"])
    before: int | None = Field(description="Version that a rollback restores; null: none.", examples=[5])
    undoes: int | None = Field(
        description="For a rollback: the version that it reverted; null: no rollback.", examples=[None]
    )


class AdminModel(Reply):
    """An identifier, its backends and its price."""

    id: ModelId
    source: Source = Field(description="Where the identifier is declared.")
    context_length: Count = Field(
        description="Maximum number of tokens of prompt and reply together.", examples=[32_768]
    )
    max_output: Count = Field(description="Maximum number of tokens of one choice.", examples=[4096])
    backends: list[AdminBackend]
    fallback: str | None = Field(
        description="Backend that replies while the others have no capacity; null: none.", examples=["chat-small"]
    )
    aliases: list[str] = Field(description="Further names for clients.", examples=[["gpt-4o-mini"]])
    price: AdminPrice
    traffic: AdminTraffic | None = Field(description="null: the weights of `config.yaml` apply.")
    rollback: Weights | None = Field(
        description="Weights that a rollback restores; null: there are none.", examples=[{"chat-v0": 100}]
    )


class AdminModelList(Reply):
    """All identifiers."""

    data: list[AdminModel]


class AdminPriceVersion(Reply):
    """A price that a command set."""

    input: PerMillion
    cached_input: PerMillion = Field(examples=["0.07"])
    output: PerMillion = Field(examples=["1.10"])
    version: Count = Field(examples=[6])
    effective_at: Instant


class AdminModelDetails(AdminModel):
    """An identifier with its history."""

    first_token_target_s: float = Field(description="Target for the time to the first token.", examples=[5.0])
    output_token_target_s: float = Field(
        description="Target for the seconds per output token, as the mean over a reply.", examples=[0.2]
    )
    recommended_temperatures: dict[str, float] = Field(description="By use.", examples=[{"conversation": 1.0}])
    sampling: dict[str, float] = Field(
        description="Defaults for parameters that a request omits.", examples=[{"temperature": 0.7}]
    )
    history: list[AdminTraffic] = Field(description="Latest traffic changes, newest first.")
    prices: list[AdminPriceVersion] = Field(description="Past and future prices, newest version first.")


class Removed(Reply):
    """An identifier that is no longer served."""

    id: ModelId


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
