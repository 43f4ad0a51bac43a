"""Types in bodies, queries and replies: amounts, times and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, create_model

from serve_app.api import errors
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import format_amount, format_price, parse_amount
from serve_app.contracts.units import utc_text

Schema = dict[str, Any]


class Body(BaseModel):
    """A request's body. Unknown fields and wrong types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True)


def example(**given: Any) -> ConfigDict:
    """Returns the `model_config` of a body with this example, which the document shows as the request to send."""
    return ConfigDict(json_schema_extra={"examples": [given]})


class Query(BaseModel):
    """A request's query parameters. The description of a field is the parameter's description in the document."""

    model_config = ConfigDict(strict=True)


class Reply(BaseModel):
    """A reply's body. Only fields that were set are sent, so a field with a default may be absent."""

    @classmethod
    def from_fields(cls, snapshot: Any, **more: Any) -> Self:
        """Builds a reply from the fields with the same names in a dataclass of the contracts, and `more`."""
        return cls.model_validate({one.name: getattr(snapshot, one.name) for one in fields(snapshot)} | more)


def _from_number(convert: Callable[[Any], str]) -> BeforeValidator:
    return BeforeValidator(lambda value: convert(value) if isinstance(value, int | float) else value)


# For replies, which are built from the numbers of the contracts: nano-units, nano-units per token, Unix seconds.
Money = Annotated[
    str,
    _from_number(format_amount),
    Field(
        pattern=r"^-?[0-9]+\.[0-9]{2,9}$",
        description="An exact decimal in the account's currency.",
        examples=["12.50"],
    ),
]
PerMillion = Annotated[
    str,
    _from_number(format_price),
    Field(pattern=r"^[0-9]+\.[0-9]{2,3}$", description="Per million tokens.", examples=["0.27"]),
]
_DATE_TIME: Final[Schema] = {"format": "date-time"}
Time = Annotated[
    str,
    _from_number(utc_text),
    Field(json_schema_extra=_DATE_TIME, description="In UTC.", examples=["2026-11-30T12:00:00Z"]),
]
Instant = Annotated[
    str,
    _from_number(partial(utc_text, precision="milliseconds")),
    Field(json_schema_extra=_DATE_TIME, description="In UTC.", examples=["2026-11-30T12:00:00.000Z"]),
]
Day = Annotated[str, Field(json_schema_extra={"format": "date"}, description="In UTC.", examples=["2026-11-30"])]
Count = Annotated[int, Field(ge=0)]
AccountId = Annotated[str, Field(examples=["acct_7k2m9x4q1v8d3n6p5w0r"])]
AccountName = Annotated[str, Field(examples=["Northwind Traders"])]
KeyId = Annotated[str, Field(examples=["key_3h8t5c0n7z2b9g4m6s1x"])]
RequestId = Annotated[str, Field(examples=["chatcmpl-5d41402abc4b2a76b9719d911017c592"])]
ModelId = Annotated[str, Field(examples=["svc-chat"])]
BackendName = Annotated[str, Field(examples=["chat-v1"])]
Currency = Annotated[str, Field(examples=["USD"])]
Next = Annotated[
    str | None,
    Field(description="Pass as `after` to get the next page; null on the last page.", examples=[None]),
]

# For queries, where every value is text.
INTEGER = BeforeValidator(lambda text: int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else text)

# For requests. `amount_of` and `expiry_of` check the rest: their messages say more than a pattern can.
FLAG = BeforeValidator(lambda text: {"true": True, "false": False}.get(text, text))
Amount = Annotated[
    str,
    Field(
        description="A decimal such as 12.50, with at most nine decimal places, in the service's currency.",
        json_schema_extra={"pattern": r"^[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?$"},
    ),
]
TimeToCome = Annotated[str, Field(description="A future time.", json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(min_length=1, max_length=100, description="Printable characters.")]


def limits_in(base: type[BaseModel], names: Sequence[str], *, nullable: bool = True) -> Any:
    """Returns a base model with a field for each of these limits.

    In a body, each limit is optional and may be null. In a reply, it is an integer, or null if `nullable`.
    """
    declared = get_type_hints(Contract, include_extras=True)
    schemas = TypeAdapter(Contract).json_schema()["properties"]
    kinds: dict[str, Any] = {}
    for name in names:
        shown: Schema = {"description": schemas[name].get("description"), "examples": [schemas[name]["default"]]}
        if issubclass(base, Body):
            kinds[name] = (declared[name] | None, Field(None, **shown))
        else:
            kinds[name] = (int | None if nullable else int, Field(**shown))
    return create_model("Limits", __base__=base, **kinds)


def amount_of(text: str, param: str, *, negative: bool = False) -> int:
    """Parses a decimal amount into nano-units. It must be above 0, or with `negative` anything but 0. Raises 422."""
    try:
        amount = parse_amount(text, negative=negative)
    except LedgerError as error:
        raise errors.invalid_parameters(f"{param}: {error}", param=param) from None
    if not amount:
        raise errors.invalid_parameters(f"{param} must {'not be' if negative else 'be above'} 0", param=param)
    return amount


def expiry_of(text: str | None, now: float) -> float | None:
    """Parses `expires_at` into Unix seconds. Raises 422 for a different format or a time in the past."""
    if text is None:
        return None
    at = moment(text, "expires_at")
    if at <= now:
        raise errors.invalid_parameters(f"expires_at: {text} has passed: use a time in the future", param="expires_at")
    return at


def moment(text: str, param: str, *, day: Literal["its start", "its end"] | None = None) -> float:
    """Parses an ISO 8601 time with an offset into Unix seconds. Raises 422.

    With `day`, also accepts a day and returns its start or end in UTC.
    """
    takes = "a time with a UTC offset like 2026-11-30T12:00:00Z" + (", or a day like 2026-11-30" if day else "")
    try:
        if day and len(text) == len("2026-11-30"):
            start = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
            return (start if day == "its start" else start + timedelta(days=1)).timestamp()
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.timestamp()
    except (ValueError, OverflowError):
        pass
    raise errors.invalid_parameters(f"{param}: {text[:60]!r} is not a valid time: use {takes}", param=param)
