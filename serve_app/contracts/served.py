"""Served models in the ledger, in addition to `config.yaml`: traffic shares, identifiers, prices and backends.

Times are Unix seconds. For an identifier in `config.yaml`, a row of traffic in the ledger overrides the weights there,
and a price in effect in the ledger overrides the price there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from annotated_types import Ge, Gt, Le

from serve_app.contracts.money import Price, PriceVersion

Tokens = Annotated[int, Ge(1), Le(10**8)]
Seconds = Annotated[float, Gt(0), Le(3600)]
Temperature = Annotated[float, Ge(0), Le(2)]

MAX_ALIASES: Final = 50  # of one identifier
ALIAS_PATTERN: Final = r"^([A-Za-z0-9][A-Za-z0-9._:/@+-]{0,98}\*?|\*)$"
_ALIAS: Final = re.compile(ALIAS_PATTERN, re.ASCII)

#: Options of a backend's deployment, as in `config.yaml` next to the deployment's name.
BACKEND_OPTIONS: Final = (
    "num_replicas",
    "autoscaling_config",
    "ray_actor_options",
    "max_ongoing_requests",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "user_config",
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A served identifier as customers see it, with the price at the time of reading."""

    identifier: str
    context_length: int  # tokens
    max_output: int  # tokens
    price: Price
    recommended_temperatures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Weights of one identifier's backends, all above 0, since `changed_at`. Rows are never changed."""

    identifier: str
    version: int  # ledger version: one counter for all identifiers
    weights: Mapping[str, int]
    changed_at: float
    actor: str
    reason: str
    before: int | None = None  # version of the row that a rollback restores: the row before this roll-out began
    undoes: int | None = None  # for a rollback: the version that it undid


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for values that a request omits; None: the service's default. Ranges as in a chat request."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    temperature: Temperature | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0), Le(1_000_000)] | None = None  # 0: off
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Ge(0.01), Le(10)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Properties of an identifier that is not in `config.yaml`."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    context_length: Tokens  # prompt and reply together
    max_output: Tokens  # per choice
    first_token_target_s: Seconds = 5.0
    output_token_target_s: Seconds = 0.2  # maximum seconds per output token, as the mean over a reply
    recommended_temperatures: Mapping[str, Temperature] = field(default_factory=dict)  # by use
    sampling: SamplingDefaults = SamplingDefaults()
    fallback: str | None = None  # backend that answers while the weighted backends have no capacity
    aliases: tuple[str, ...] = ()  # further names for clients; `gpt-*` stands for all names that begin with `gpt-`


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An identifier that was created by command."""

    identifier: str
    version: int
    spec: ModelSpec
    created_at: float


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend deployed by command. The args and options of a name never change."""

    name: str  # the Serve application's name, without `:adapter`
    version: int
    args: Mapping[str, Any]  # the application's `args`, as in `config.yaml`
    options: Mapping[str, Any]  # options of its deployment: BACKEND_OPTIONS
    created_at: float
    retired_at: float | None = None  # set when no identifier uses it; it is deleted once its replies have ended


@dataclass(frozen=True, slots=True)
class Served:
    """Traffic, identifiers, prices and backends in one snapshot."""

    version: int  # version of the last change; 0: no change yet
    #: By identifier, including those in `config.yaml`. Without an entry, the weights in `config.yaml` apply.
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    before: Mapping[str, Traffic] = field(default_factory=dict)  # traffic that a rollback would restore, if any
    models: Mapping[str, ServedModel] = field(default_factory=dict)  # by identifier
    #: By identifier, in the order of `price_at`: the price in effect and scheduled prices.
    prices: Mapping[str, tuple[PriceVersion, ...]] = field(default_factory=dict)
    backends: Mapping[str, Backend] = field(default_factory=dict)  # by name, without those retired long ago


def check_aliases(aliases: Mapping[str, Sequence[str]]) -> None:
    """Checks `aliases`, which has the aliases of each identifier. Raises ValueError for the first fault."""
    owners: dict[str, str] = {}
    for identifier, names in aliases.items():
        if len(names) > MAX_ALIASES:
            raise ValueError(f"aliases of {identifier}: at most {MAX_ALIASES}, but there are {len(names)}")
        for name in names:
            if not _ALIAS.fullmatch(name):
                rule = (
                    "an alias begins with a letter or digit, has at most 99 letters, digits and . _ : / @ + -, and may "
                    "end with *"
                )
                raise ValueError(f"aliases of {identifier}: {name[:100]!r}: {rule}")
            if name in aliases:
                raise ValueError(f"aliases of {identifier}: {name} is an identifier")
            if name in owners:
                raise ValueError(f"aliases of {identifier}: {name} is already an alias of {owners[name]}")
            owners[name] = identifier


def raised(weights: Mapping[str, int], before: Mapping[str, int]) -> set[str]:
    """Returns the backends whose share is larger than before."""
    total, total_before = sum(weights.values()), max(1, sum(before.values()))
    return {name for name, weight in weights.items() if weight * total_before > before.get(name, 0) * total}
