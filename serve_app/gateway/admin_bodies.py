"""What `/admin` takes: bodies, amounts, times and page sizes, each refused with the name of its field."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.api import errors
from serve_app.api.codec import parse_object
from serve_app.gateway.bodies import read_body
from serve_app.ledger.errors import LedgerError
from serve_app.ledger.money import parse_amount

MOST_BYTES = 64 * 1024

Limit = Annotated[int, Field(ge=1, le=10**12)]
Weight = Annotated[int, Field(ge=1, le=10_000)]
Name = Annotated[str, Field(min_length=1, max_length=100, description="Printable.")]
# What else an amount and a time must be is checked by `amount_of` and `expiry_of`, which say more than a pattern.
Amount = Annotated[
    str,
    Field(
        description="A decimal such as 12.50, of at most nine decimals, in the service's currency.",
        json_schema_extra={"pattern": r"^[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?$"},
    ),
]
Time = Annotated[str, Field(description="A time to come.", json_schema_extra={"format": "date-time"})]
Memo = Annotated[str, Field(max_length=500)]
Models = Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1, max_length=100)]
Period = Literal["day", "month"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CreateAccount(_Body):
    """POST /admin/accounts. `expires_at` is that of an opening grant."""

    name: Name
    credit: Amount | None = None
    kind: Literal["top_up", "grant"] = "top_up"
    expires_at: Time | None = None
    rpm: Limit | None = None
    tpm: Limit | None = None
    concurrency: Limit | None = None
    weight: Weight | None = None


class Credit(_Body):
    """POST /admin/accounts/{id}/credit. Only grants expire."""

    amount: Amount
    kind: Literal["top_up", "grant"] = "top_up"
    memo: Memo = ""
    expires_at: Time | None = None


class Correction(_Body):
    """POST /admin/accounts/{id}/correct: an amount above 0 is given back, below is taken back."""

    amount: Amount
    memo: Annotated[str, Field(min_length=1, max_length=500)]


class TakeBack(_Body):
    """POST /admin/accounts/{id}/grants/{grant}/take-back. The ledger keeps the grant's number before the memo."""

    memo: Annotated[str, Field(min_length=1, max_length=400)]


class LimitChanges(_Body):
    """PATCH /admin/accounts/{id}/limits; null is the service's default."""

    rpm: Limit | None = None
    tpm: Limit | None = None
    concurrency: Limit | None = None
    weight: Weight | None = None


class KeyTerms(_Body):
    """What a key may do; null is no bound of its own."""

    models: Models | None = None
    rpm: Limit | None = None
    tpm: Limit | None = None
    concurrency: Limit | None = None
    budget: Amount | None = None
    budget_period: Period | None = None
    expires_at: Time | None = None


class CreateKey(KeyTerms):
    """POST /admin/accounts/{id}/keys."""

    name: Name = "key"


class KeyChanges(KeyTerms):
    """PATCH /admin/keys/{id}: what is not named stays, null takes a bound away."""

    name: Name | None = None


Body = TypeVar("Body", bound=_Body)


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The request's body. Raises 400 for what is no such object, 422 for a value out of range."""
    raw = await read_body(request, MOST_BYTES)
    try:
        return kind.model_validate(parse_object(raw or b"{}", MOST_BYTES))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, problem["loc"]))
        text = f"{param}: {problem['msg']}" if param else problem["msg"]
        if problem["type"] in ("missing", "extra_forbidden") or problem["type"].endswith("_type"):
            raise errors.invalid_format(text, param=param or None) from None
        raise errors.invalid_parameters(text, param=param or None) from None


def amount_of(text: str, param: str, *, negative: bool = False) -> int:
    """A decimal amount in nano-units: above 0, or with `negative` anything but 0. Raises 422."""
    try:
        amount = parse_amount(text, negative=negative)
    except LedgerError as error:
        raise errors.invalid_parameters(f"{param}: {error}", param=param) from None
    if not amount:
        raise errors.invalid_parameters(f"{param} must {'not be' if negative else 'be above'} 0", param=param)
    return amount


def expiry_of(text: str | None, now: float, param: str = "expires_at") -> float | None:
    """Unix seconds of a time to come. Raises 422 for another form, and for a time that has passed."""
    if text is None:
        return None
    at = _moment(text, param)
    if at <= now:
        raise errors.invalid_parameters(f"{param}: {text} has passed: give a time to come", param=param)
    return at


def key_terms(body: KeyTerms, served: tuple[str, ...], now: float) -> dict[str, Any]:
    """The terms that were named, as the ledger takes them. Raises 422.

    An identifier that is not served is refused: a key for a misspelt model would refuse everything.
    """
    given = body.model_dump(exclude_unset=True)
    models = given.get("models")
    if models is not None:
        unknown = [name for name in models if name not in served]
        if unknown:
            raise errors.invalid_parameters(
                f"models: there is no model {unknown[0]!r}; served are {', '.join(served)}", param="models"
            )
        given["models"] = tuple(dict.fromkeys(models))
    if given.get("budget") is not None:
        given["budget"] = amount_of(given["budget"], "budget")
    if "expires_at" in given:
        given["expires_at"] = expiry_of(given["expires_at"], now)
    return given


def period_of(first: str | None, last: str | None) -> tuple[float | None, float | None]:
    """From when on and until before when, in Unix seconds, of `from` and `to`. Raises 422.

    Days are UTC and both included; a time in ISO 8601 counts as it is, `to` not included.
    """
    since = None if first is None else _moment(first, "from", day="its start")
    until = None if last is None else _moment(last, "to", day="its end")
    if since is not None and until is not None and since >= until:
        raise errors.invalid_parameters(f"from {first} must be before to {last}", param="from")
    return since, until


def page_of(request: Request, *, default: int, most: int) -> int:
    """How many rows are asked for with `limit`. Raises 422."""
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise errors.invalid_parameters(f"limit must be a whole number from 1 to {most}", param="limit")
    return int(limit)


def _moment(text: str, param: str, *, day: Literal["its start", "its end"] | None = None) -> float:
    """Unix seconds of an ISO 8601 time with an offset, and where `day` says which end, of a day in UTC."""
    takes = "a time with its offset like 2026-11-30T12:00:00Z" + (", or a day like 2026-11-30" if day else "")
    try:
        if day and len(text) == len("2026-11-30"):
            start = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
            return (start if day == "its start" else start + timedelta(days=1)).timestamp()
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.timestamp()
    except (ValueError, OverflowError):
        pass
    raise errors.invalid_parameters(f"{param}: {text[:60]!r} is no time: give {takes}", param=param)
