"""Validates values in the ledger's commands. Each check raises InvalidValue with the accepted form."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, false

from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.limits import ACCOUNT_LIMITS, Contract

MAX_PAGE = 1000
_YEAR_10000 = 253402300800.0
_LIMIT_TYPES = get_type_hints(Contract, include_extras=True)
_LIMITS = {name: TypeAdapter[int](_LIMIT_TYPES[name]) for name in ACCOUNT_LIMITS}


def is_text(text: Any, longest: int) -> bool:
    """Returns whether this is a string of 1 to `longest` printable characters, as every text in the ledger is."""
    return isinstance(text, str) and 1 <= len(text) <= longest and text.isprintable()


def equals(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    """Returns `column == text`, or false if no column can hold the text: PostgreSQL rejects NUL even in comparisons."""
    return column == text if text.isprintable() else false()


def check_name(name: str, what: str = "a name", *, longest: int = 100) -> None:
    if not is_text(name, longest) or not name.strip():
        raise InvalidValue(f"{name!r}: {what} has 1 to {longest} printable characters")


def check_fields(given: Iterable[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidValue(f"no field {', '.join(map(repr, unknown))}: use any of {', '.join(known)}")


def check_limit(name: str, value: Any) -> None:
    """Accepts None, or a whole number in the range that `contracts.limits` declares for this limit."""
    if value is None:
        return
    try:
        _LIMITS[name].validate_python(value, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise InvalidValue(f"{name} {value!r}: {reason}; use None to remove the limit") from None


def check_time(at: Any) -> float:
    """Returns the time in Unix seconds, up to the year 9999."""
    if type(at) not in (int, float) or not 0 <= at < _YEAR_10000:  # NaN compares false
        raise InvalidValue(f"{at!r} is not a valid time: use Unix seconds")
    return float(at)


def check_day(day: str) -> str:
    try:
        if date.fromisoformat(day).isoformat() == day:
            return day
    except ValueError:
        pass
    raise InvalidValue(f"{day!r} is not a valid day: use YYYY-MM-DD, in UTC")


def check_page(limit: int) -> int:
    if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
        raise InvalidValue(f"limit {limit!r}: must be from 1 to {MAX_PAGE}")
    return limit
