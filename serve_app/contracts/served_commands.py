"""Operations on traffic, identifiers, prices and backends, as in `contracts.commands`.

Each change gets the next version number of the ledger. A repetition changes nothing and returns the current state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.money import Price, PriceVersion
from serve_app.contracts.served import Backend, ModelSpec, Served, ServedModel, Traffic


@dataclass(frozen=True, slots=True)
class ReadServed(Command[Served | None]):
    """Returns the current `Served`, or None if nothing has changed since version `after`. Start with -1."""

    after: int = -1


@dataclass(frozen=True, slots=True)
class SetTraffic(Command[Traffic]):
    """Sets the weights of an identifier's backends; a weight of 0 omits the backend.

    `expected` is the version of the traffic to replace: 0 if there is none, None for any version. For an identifier in
    `config.yaml`, `configured` has its weights there. If these applied until now, they also become a row, so that
    a rollback can restore them. For such an identifier, empty `weights` restore the weights in `config.yaml`.

    Raises ModelNotFound, InvalidValue, and Conflict if another change came first or a backend is retired.
    """

    identifier: str
    weights: Mapping[str, int]
    reason: str = ""
    expected: int | None = None
    configured: Mapping[str, int] | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RollBackTraffic(Command[Traffic]):
    """Restores the weights from before the roll-out: `Traffic.before`. A second rollback goes back one more roll-out.

    A rollback of a version that is already rolled back returns the existing rollback, so several processes may request
    it at once. Raises ModelNotFound, InvalidValue, and Conflict if a different change came first, if there is nothing
    to restore, or if a backend is retired.
    """

    identifier: str
    expected: int  # the version to undo
    reason: str = ""
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListTraffic(Command[list[Traffic]]):
    """Returns the rows of an identifier, newest first, before version `before`. An unknown identifier has no rows."""

    identifier: str
    before: int | None = None
    limit: int = 20


@dataclass(frozen=True, slots=True)
class DeployBackend(Command[Backend]):
    """Adds a backend, or restores a retired one with the same args and options.

    Raises InvalidValue for an invalid name, args or options, and Conflict if the name has different args or options.
    """

    name: str
    args: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RetireBackend(Command[Backend]):
    """Retires a backend.

    Raises BackendNotFound, and Conflict while an identifier uses it in its weights or as fallback.
    """

    name: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class CreateModel(Command[ServedModel]):
    """Adds an identifier with its first weights and price.

    Raises InvalidValue for an invalid value, and Conflict if the identifier exists with other values or a backend is
    retired.
    """

    identifier: str
    spec: ModelSpec
    weights: Mapping[str, int]
    price: Price
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UpdateModel(Command[ServedModel]):
    """Replaces an identifier's `spec`. Raises ModelNotFound, InvalidValue, and Conflict if the fallback is retired."""

    identifier: str
    spec: ModelSpec
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RemoveModel(Command[None]):
    """Stops serving an identifier; its history stays. Raises ModelNotFound if it never existed."""

    identifier: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SchedulePrice(Command[PriceVersion]):
    """Sets the price of an identifier from `effective_at` on; None: from now on.

    A second price for the same time replaces the first. `is_configured`: the identifier is in `config.yaml`. Raises
    ModelNotFound, and InvalidValue, for example for a time in the past.
    """

    identifier: str
    price: Price
    effective_at: float | None = None
    is_configured: bool = False
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPrices(Command[list[PriceVersion]]):
    """Returns past and scheduled prices of an identifier, newest version first, without the price in `config.yaml`."""

    identifier: str
