"""When something expires, as it is typed: a time, a day, or a duration from now. Pure: the clock is handed in."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

from serve_app.cli.errors import usage_error

FORM = "30d, 12h, 4w, 90min, 2026-12-31 or 2026-12-31T18:00:00Z"
METAVAR = "30d|12h|2026-12-31|TIME"

_DURATION = re.compile(r"([1-9][0-9]{0,5})(min|h|d|w)", re.ASCII)
_UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def expiry_of(option: str, text: str, now: datetime) -> str:
    """The moment as ISO 8601 in UTC; a day counts to its end. Raises a usage error, also for what has passed."""
    try:
        at = _moment(text, now)
    except (ValueError, OverflowError):
        raise usage_error(f"{option} {text}: write it like {FORM}; times need a Z or an offset") from None
    if at <= now:
        raise usage_error(f"{option} {text}: that has passed")
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _moment(text: str, now: datetime) -> datetime:
    duration = _DURATION.fullmatch(text)
    if duration:
        return now + int(duration[1]) * _UNITS[duration[2]]
    if len(text) == len("2026-12-31"):
        return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC) + timedelta(days=1)
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError("which time zone?")
    return at.astimezone(UTC)
