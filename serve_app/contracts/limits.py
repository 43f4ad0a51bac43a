"""Declares every limit once. Settings, columns, operators' requests, checks, headers and refusals derive from this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from annotated_types import Ge, Le

# Not pydantic's `Field`, which is equivalent: the command line imports this module and must start quickly.
Amount = Annotated[int, Ge(1), Le(10**12)]
Weight = Annotated[int, Ge(1), Le(1_000_000)]
Unit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit over time. The unit is also the code of its refusals and its name in the headers.

    If several limits have the same unit, the headers show the tightest.
    """

    unit: Unit
    per: str  # such as "minute" in the message of a refusal, "Requests per minute"
    window_s: float


@dataclass(frozen=True, slots=True)
class Contract:
    """Limits that apply to an account. The defaults apply to an account without specific limits.

    Metadata of a field: `rate` for limits over time; `of_keys` is False if a key cannot have the limit.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    rpm: Amount = field(default=600, metadata={"rate": Rate("requests", "minute", 60.0)})
    """Requests per minute."""
    tpm: Amount = field(default=1_000_000, metadata={"rate": Rate("tokens", "minute", 60.0)})
    """Tokens per minute, of prompts and replies."""
    concurrency: Amount = 64
    """Concurrent requests."""
    weight: Weight = field(default=100, metadata={"of_keys": False})
    """Share of a backend's capacity, relative to other accounts, while demand exceeds it."""

    def with_own(self, own: Mapping[str, int]) -> Contract:
        """Returns these limits, each replaced by the account's specific limit if there is one."""
        return replace(self, **own) if own else self


ACCOUNT_LIMITS: Final = tuple(limit.name for limit in fields(Contract))
KEY_LIMITS: Final = tuple(limit.name for limit in fields(Contract) if limit.metadata.get("of_keys", True))
#: Limits over time by name, in the order in which they are checked within a unit.
RATES: Final[Mapping[str, Rate]] = {
    limit.name: limit.metadata["rate"] for limit in fields(Contract) if "rate" in limit.metadata
}
