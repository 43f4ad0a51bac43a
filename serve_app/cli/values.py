"""Converts what an operator types to the form that the admin API expects. Raises UsageError for invalid text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, get_type_hints

import typer
from annotated_types import Le

from serve_app.cli.output import UsageError
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.limits import ACCOUNT_LIMITS, KEY_LIMITS, Contract
from serve_app.contracts.money import parse_amount

EXPIRY = "a duration (30d, 12h) or a date (2026-12-31, until the end of that day, UTC)"
_EXPIRY_EXAMPLES = "30d, 12h, 4w, 90min, 2026-12-31 or 2026-12-31T18:00:00Z"
_DURATION = re.compile(r"([1-9][0-9]{0,5})(min|h|d|w)", re.ASCII)
_UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def plain_amount(text: str, *, signed: bool = False) -> str:
    """Returns an amount as a plain decimal. It must be above 0; with `signed`, only 0 is rejected."""
    try:
        nano = parse_amount(text, negative=True)
    except InvalidAmount as error:
        raise UsageError(str(error)) from None
    if signed and nano == 0:
        raise UsageError(f"the amount must not be 0: {text}")
    if nano <= 0 and not signed:
        raise UsageError(f"the amount must be above 0, not {text}")
    return f"{Decimal(text):f}"


def parse_expiry(text: str, now: datetime) -> str:
    """Parses --expires: a time, the end of a day, or a duration from `now`. Returns ISO 8601 in UTC."""
    return _parse_time("--expires", text, now, day_counts=timedelta(days=1))


def parse_start(option: str, text: str, now: datetime) -> str:
    """Parses a start: a time, the beginning of a day, or a duration from `now`. Returns ISO 8601 in UTC."""
    return _parse_time(option, text, now, day_counts=timedelta())


def _parse_time(option: str, text: str, now: datetime, *, day_counts: timedelta) -> str:
    try:
        if duration := _DURATION.fullmatch(text):
            at = now + int(duration[1]) * _UNITS[duration[2]]
        elif len(text) == len("2026-12-31"):
            at = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC) + day_counts
        else:
            at = datetime.fromisoformat(text)
            if at.tzinfo is None:
                raise ValueError("no time zone")
        at = at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text}: write it like {_EXPIRY_EXAMPLES}; times need a Z or an offset") from None
    if at <= now:
        raise UsageError(f"{option} {text}: must be in the future")
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def parse_age(option: str, text: str, now: datetime) -> str:
    """Parses a duration such as 12h. Returns the time that lies this long before `now`, as ISO 8601 in UTC."""
    if not (duration := _DURATION.fullmatch(text)):
        raise UsageError(f"{option} {text}: write it like 30min, 12h, 7d or 4w")
    try:
        at = now - int(duration[1]) * _UNITS[duration[2]]
    except OverflowError:
        raise UsageError(f"{option} {text}: too long ago") from None
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def parse_pairs(option: str, given: Iterable[str]) -> dict[str, Any]:
    """Parses NAME=VALUE options. Returns the values by name, each parsed as YAML."""
    import yaml

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise UsageError(f"{option} {text}: must be NAME=VALUE")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"{option} {text}: the value is not YAML") from None
    return found


def parse_numbers(option: str, given: Iterable[str], *, whole: bool = False) -> dict[str, float]:
    """Like `parse_pairs`, for numbers only; with `whole`, for integers only."""
    found = parse_pairs(option, given)
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise UsageError(f"{option} {name}={value}: must be a {'whole ' if whole else ''}number")
    return found


def parse_day(option: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise UsageError(f"{option} {text}: must be a day like 2026-11-30") from None


_ANNOTATIONS = get_type_hints(Contract, include_extras=True)
MAX_LIMITS: dict[str, Any] = {
    limit: next(bound.le for bound in _ANNOTATIONS[limit].__metadata__ if isinstance(bound, Le))
    for limit in ACCOUNT_LIMITS
}


_LIMIT_NAMES = {
    "rpm": "Requests per minute",
    "tpm": "Tokens per minute",
    "concurrency": "Concurrent requests",
}


def _account_limit(limit: str) -> Any:
    help = f"{_LIMIT_NAMES.get(limit, limit)}, or default."
    if limit == "weight":
        help = f"Share under pressure, relative to other accounts: 1 to {MAX_LIMITS[limit]:,}, or default."
    return Annotated[str | None, typer.Option(metavar="N", help=help)]


# One option for each limit that serve_app.contracts.limits declares. The docstring of serve_app.cli.command.command
# explains how these mappings are used.
ACCOUNT_LIMIT_OPTIONS = {limit: _account_limit(limit) for limit in ACCOUNT_LIMITS}
KEY_LIMIT_OPTIONS = {
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help=f"{_LIMIT_NAMES.get(limit, limit)} of this key, or none."),
    ]
    for limit in KEY_LIMITS
}
AccountLimits = Annotated[dict[str, str], ACCOUNT_LIMIT_OPTIONS]


def parse_limits(given: Mapping[str, str], reset: Iterable[str] = (), *, word: str) -> dict[str, int | None]:
    """Parses the given limits. A limit is None if its text is `word`, or if `reset` names it.

    `word` is "default" or "none".
    """
    changes = {limit: _parse_limit(limit, text, word) for limit, text in given.items()}
    for limit in reset:
        if limit not in ACCOUNT_LIMITS:
            raise UsageError(f"--default {limit}: must be one of {', '.join(ACCOUNT_LIMITS)}")
        if limit in changes:
            raise UsageError(f"--{limit} and --default {limit} cannot be combined: use only one of them")
        changes[limit] = None
    return changes


def _parse_limit(limit: str, text: str, word: str) -> int | None:
    if text == word:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UsageError(f"--{limit} {text}: must be a whole number of at least 1, or `{word}`")
    if int(text) > MAX_LIMITS[limit]:
        raise UsageError(f"--{limit} {text}: must be at most {MAX_LIMITS[limit]:,}")
    return int(text)
