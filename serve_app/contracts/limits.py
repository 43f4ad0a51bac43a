"""Every limit, declared once: settings, columns, operators' requests, checks, headers and refusals follow from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Final, Literal

from annotated_types import Ge, Le

# Not pydantic's `Field`, which means the same to pydantic: the command line imports this and must start quickly.
Amount = Annotated[int, Ge(1), Le(10**12)]
Weight = Annotated[int, Ge(1), Le(1_000_000)]
Unit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a limit over time counts. The unit is also the code of its refusals and its name in the headers.

    Of several limits with one unit the headers show the tightest.
    """

    unit: Unit
    per: str  # in refusals: "Requests per minute"
    window_s: float


@dataclass(frozen=True, slots=True)
class Contract:
    """The limits that apply to an account. The defaults are those of an account that has none of its own.

    A field's metadata: `rate` for limits over time; `of_keys` False when a key can't have the limit.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    rpm: Amount = field(default=600, metadata={"rate": Rate("requests", "minute", 60.0)})
    tpm: Amount = field(default=1_000_000, metadata={"rate": Rate("tokens", "minute", 60.0)})
    concurrency: Amount = 64  # requests at once
    weight: Weight = field(default=100, metadata={"of_keys": False})  # the share of a backend under pressure

    def with_own(self, own: Mapping[str, int]) -> Contract:
        """These limits, with those that the account has of its own in their place."""
        return replace(self, **own) if own else self


ACCOUNT_LIMITS: Final = tuple(limit.name for limit in fields(Contract))
KEY_LIMITS: Final = tuple(limit.name for limit in fields(Contract) if limit.metadata.get("of_keys", True))
#: Limits over time by name, in the order in which they are checked within a unit.
RATES: Final[Mapping[str, Rate]] = {
    limit.name: limit.metadata["rate"] for limit in fields(Contract) if "rate" in limit.metadata
}
