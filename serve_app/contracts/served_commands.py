"""The operations on what is served: traffic, identifiers, prices and backends. As in `contracts.commands`.

Each change takes a version of the ledger. A repetition changes nothing and returns what is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.money import Price
from serve_app.contracts.served import Backend, ModelSpec, PriceVersion, Served, ServedModel, Traffic


@dataclass(frozen=True, slots=True)
class ReadServed(Command[Served | None]):
    """What is served. None: its version is `after`, nothing has changed; -1 starts."""

    after: int = -1


@dataclass(frozen=True, slots=True)
class SetTraffic(Command[Traffic]):
    """Gives an identifier's backends these weights; a weight of 0 is as none.

    `expected`: the version of the identifier's traffic that is to be replaced, 0 for none. `configured`: the weights
    in `config.yaml`, of an identifier that is there; where they held until now they become a row too, so that a
    rollback finds them. Of such an identifier empty weights let those in `config.yaml` hold again.

    Raises ModelNotFound, InvalidValue, and Conflict when another change came first, or a backend is retired.
    """

    identifier: str
    weights: Mapping[str, int]
    reason: str = ""
    expected: int | None = None
    configured: Mapping[str, int] | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RollBackTraffic(Command[Traffic]):
    """Restores the weights from before the roll-out: `Traffic.before`. A second rollback goes one roll-out further.

    A rollback of a version that is rolled back already returns that one, so several processes may decide it at once.
    Raises ModelNotFound, InvalidValue, and Conflict when another change than that came first, when there is nothing
    to restore, or a backend is retired.
    """

    identifier: str
    expected: int  # the version to take back
    reason: str = ""
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListTraffic(Command[list[Traffic]]):
    """The rows of an identifier, newest first, before version `before`; none where there never was one."""

    identifier: str
    before: int | None = None
    limit: int = 20


@dataclass(frozen=True, slots=True)
class DeployBackend(Command[Backend]):
    """Adds a backend, or brings back a retired one of the same args and options.

    Raises InvalidValue, and Conflict when the name stands for other args or options.
    """

    name: str
    args: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RetireBackend(Command[Backend]):
    """Gives a backend up.

    Raises BackendNotFound, and Conflict while an identifier has it in its weights or as fallback.
    """

    name: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class CreateModel(Command[ServedModel]):
    """Adds an identifier with its first weights and price.

    Raises InvalidValue, and Conflict when the identifier exists with other values, or a backend is retired.
    """

    identifier: str
    spec: ModelSpec
    weights: Mapping[str, int]
    price: Price
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UpdateModel(Command[ServedModel]):
    """Replaces what `spec` says. Raises ModelNotFound, InvalidValue, and Conflict when the fallback is retired."""

    identifier: str
    spec: ModelSpec
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RemoveModel(Command[None]):
    """Serves an identifier no more; its history stays. Raises ModelNotFound when there never was one."""

    identifier: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SchedulePrice(Command[PriceVersion]):
    """The price of an identifier from `effective_at` on; None: from now on.

    A second price for the same time replaces the first. `is_configured`: the identifier is in `config.yaml`.
    Raises ModelNotFound, and InvalidValue, also for a time that has passed.
    """

    identifier: str
    price: Price
    effective_at: float | None = None
    is_configured: bool = False
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPrices(Command[list[PriceVersion]]):
    """Prices that an identifier had and will have, beside that in `config.yaml`; the newest version first."""

    identifier: str
