"""The range of time that a page shows: a preset, or two dates. All days are UTC."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from serve_app.contracts.periods import Period, month_named, period_at
from serve_app.contracts.units import DAY_S, HOUR_S

PRESETS: Final = {
    "24h": "24 hours",
    "7d": "7 days",
    "30d": "30 days",
    "90d": "90 days",
    "month": "This month",
    "last-month": "Last month",
}
CUSTOM: Final = "custom"
DEFAULT: Final = "30d"
MAX_DAYS: Final = 366
MAX_DAYS_BY_HOUR: Final = 2
_DAYS: Final = {"7d": 7, "30d": 30, "90d": 90}
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DateRange:
    """Unix times `begins <= t < ends`, and the names of the hours or days in it, oldest first."""

    name: str  # of a preset, or CUSTOM
    begins: float
    ends: float
    unit: Literal["hour", "day"]
    moments: tuple[str, ...]  # "2026-05-31" or "2026-05-31T23"

    @property
    def first_day(self) -> str:
        return self.moments[0][:10]

    @property
    def last_day(self) -> str:
        return self.moments[-1][:10]

    @property
    def query(self) -> dict[str, str]:
        """The query parameters that choose this range."""
        if self.name == CUSTOM:
            return {"range": CUSTOM, "from": self.first_day, "to": self.last_day}
        return {"range": self.name}


def chosen_range(query: Mapping[str, str], now: float, default: str = DEFAULT) -> DateRange:
    """Returns the range that the query names: `range`, or `from` and `to`. Raises ValueError for wrong dates."""
    name = query.get("range", "")
    if name == CUSTOM or (name not in PRESETS and ("from" in query or "to" in query)):
        return _between(query.get("from", ""), query.get("to", ""), now)
    return preset(name if name in PRESETS else default, now)


def preset(name: str, now: float) -> DateRange:
    if name == "24h":
        ends = now // HOUR_S * HOUR_S + HOUR_S
        return _by_hour(name, ends - DAY_S, ends)
    today = period_at("day", now)
    if name in _DAYS:
        return _by_day(name, today.begins - (_DAYS[name] - 1) * DAY_S, today.ends)
    month = period_at("month", now)
    if name == "last-month":
        month = period_at("month", month.begins - DAY_S)
        return _by_day(name, month.begins, month.ends)
    return _by_day(name, month.begins, today.ends)


def day_named(name: str) -> Period:
    """Returns the day, YYYY-MM-DD. Raises ValueError."""
    if not _DAY.fullmatch(name):
        raise ValueError("Enter each date as YYYY-MM-DD.")
    day = period_at("day", month_named(name[:7]).begins + (int(name[8:]) - 1) * DAY_S)
    if day.name != name:
        raise ValueError(f"{name} is not a date. Enter each date as YYYY-MM-DD.")
    return day


def _between(first: str, last: str, now: float) -> DateRange:
    today = period_at("day", now).name
    begins, ends = day_named(first or last or today).begins, day_named(last or today).ends
    if begins >= ends:
        raise ValueError("The first date is after the last date. Swap them.")
    if ends - begins > MAX_DAYS * DAY_S:
        raise ValueError(f"The range is longer than {MAX_DAYS} days. Choose a shorter range.")
    return (_by_hour if ends - begins <= MAX_DAYS_BY_HOUR * DAY_S else _by_day)(CUSTOM, begins, ends)


def _by_hour(name: str, begins: float, ends: float) -> DateRange:
    hours = range(round((ends - begins) / HOUR_S))
    return DateRange(name, begins, ends, "hour", tuple(_iso(begins + hour * HOUR_S)[:13] for hour in hours))


def _by_day(name: str, begins: float, ends: float) -> DateRange:
    days = range(round((ends - begins) / DAY_S))
    return DateRange(name, begins, ends, "day", tuple(_iso(begins + day * DAY_S)[:10] for day in days))


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
