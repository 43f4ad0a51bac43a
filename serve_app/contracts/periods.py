"""Days and months in UTC, the periods of key budgets, and the tolerated difference between clocks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

#: Seconds by which the clocks of limiter, gateways and ledger may differ without double spending. An end time is
#: assumed to be this much earlier, and a start time this much later.
CLOCK_SKEW_S: Final = 1.0


BudgetPeriod = Literal["day", "month"]  # in UTC


@dataclass(frozen=True, slots=True)
class Period:
    """A day or a month in UTC: Unix times `begins <= t < ends`. Names of one kind sort by time."""

    name: str  # "2026-11-21" or "2026-11"
    begins: float
    ends: float


def month_named(name: str) -> Period:
    """Returns the month with a name such as "2026-11", up to the year 9998. Raises ValueError."""
    if len(name) != 7 or name > "9998-12":
        raise ValueError(f"{name!r} is not a valid month: use YYYY-MM")
    return period_at("month", datetime.strptime(f"{name}-01", "%Y-%m-%d").replace(tzinfo=UTC).timestamp())


def day_named(name: str) -> Period:
    """Returns the day with a name such as "2026-11-21". Raises ValueError."""
    return period_at("day", datetime.strptime(name, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())


def period_at(kind: BudgetPeriod, at: float) -> Period:
    """Returns the day or month that contains the Unix time `at`, from 1970 to the year 9998."""
    begins = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        name, ends = begins.strftime("%Y-%m-%d"), begins + timedelta(days=1)
    else:
        begins = begins.replace(day=1)
        name, ends = begins.strftime("%Y-%m"), (begins + timedelta(days=31)).replace(day=1)
    return Period(name, begins.timestamp(), ends.timestamp())
