"""What is served, as the ledger has it: shares of traffic, identifiers, prices and backends beside `config.yaml`.

Times are Unix seconds. `config.yaml` holds for its own identifiers, but a row of traffic overrides its weights and a
price in effect overrides its price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from annotated_types import Ge, Gt, Le

from serve_app.contracts.money import Price

Tokens = Annotated[int, Ge(1), Le(10**8)]
Seconds = Annotated[float, Gt(0), Le(3600)]
Temperature = Annotated[float, Ge(0), Le(2)]

#: Options of a backend's deployment, as `config.yaml` has them beside a deployment's name.
BACKEND_OPTIONS: Final = (
    "num_replicas",
    "autoscaling_config",
    "ray_actor_options",
    "max_ongoing_requests",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The weights of one identifier's backends, all above 0, since `changed_at`. Rows are never changed."""

    identifier: str
    version: int  # of the ledger: rises over all identifiers
    weights: Mapping[str, int]
    changed_at: float
    actor: str
    reason: str
    before: int | None = None  # version of the row that a rollback restores: the one before this roll-out began
    undoes: int | None = None  # of a rollback: the version that it took back


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request names nothing; None: the service's own default. Ranges as in a chat request."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    temperature: Temperature | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0), Le(1_000_000)] | None = None  # 0: off
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0), Le(10)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What an identifier offers that is not in `config.yaml`."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    context_length: Tokens  # of prompt and reply together
    max_output: Tokens  # of one choice
    first_token_target_s: Seconds = 5.0
    output_token_target_s: Seconds = 0.2  # the mean of a reply
    recommended_temperatures: Mapping[str, Temperature] = field(default_factory=dict)  # by use
    sampling: SamplingDefaults = SamplingDefaults()
    fallback: str | None = None  # the backend that answers while those with weight have no capacity


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An identifier that was created by command."""

    identifier: str
    version: int
    spec: ModelSpec
    created_at: float


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """What an identifier costs from `effective_at` on."""

    identifier: str
    version: int
    effective_at: float
    price: Price


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend that was deployed by command. Its name stands for these args and options for good."""

    name: str  # of the Serve application; no adapter
    version: int
    args: Mapping[str, Any]  # of the application, as in `config.yaml`
    options: Mapping[str, Any]  # of its deployment: BACKEND_OPTIONS
    created_at: float
    retired_at: float | None = None  # no identifier names it any more; it is to be deleted once it has drained


@dataclass(frozen=True, slots=True)
class Served:
    """All of it, as of one moment."""

    version: int  # of the last change; 0: nothing was ever changed
    #: By identifier, also of `config.yaml`. Without an entry the weights of `config.yaml` hold.
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    before: Mapping[str, Traffic] = field(default_factory=dict)  # what a rollback would restore, where there is such
    models: Mapping[str, ServedModel] = field(default_factory=dict)  # by identifier
    #: By identifier, in the order of `price_at`: the one in effect and those to come.
    prices: Mapping[str, Sequence[PriceVersion]] = field(default_factory=dict)
    backends: Mapping[str, Backend] = field(default_factory=dict)  # by name; those retired long ago are left out


def price_at(prices: Sequence[PriceVersion], now: float, configured: Price | None = None) -> Price:
    """The price in effect. `prices` are in the order of (effective_at, version); of two at one time the later holds.

    Before the first of them the configured price holds, or else the first: clocks of two machines differ.
    """
    for one in reversed(prices):
        if one.effective_at <= now:
            return one.price
    return prices[0].price if configured is None else configured


def raised(weights: Mapping[str, int], before: Mapping[str, int]) -> set[str]:
    """The backends whose share is larger than it was before."""
    whole, whole_before = sum(weights.values()), max(1, sum(before.values()))
    return {name for name, weight in weights.items() if weight * whole_before > before.get(name, 0) * whole}
