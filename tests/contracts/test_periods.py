"""Budget periods are days and months of UTC."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from serve_app.contracts.periods import BudgetPeriod, period_at


@pytest.mark.parametrize(
    ("period", "now", "name", "begins", "ends"),
    [
        ("day", "2026-11-30T23:59:59.999", "2026-11-30", "2026-11-30", "2026-12-01"),
        ("day", "2026-12-01T00:00:00", "2026-12-01", "2026-12-01", "2026-12-02"),
        ("month", "2026-11-30T23:59:59.999", "2026-11", "2026-11-01", "2026-12-01"),
        ("month", "2026-12-31T23:59:59.999", "2026-12", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-01T00:00:00", "2027-01", "2027-01-01", "2027-02-01"),
        ("month", "2028-02-29T00:00:00", "2028-02", "2028-02-01", "2028-03-01"),
    ],
)
def test_periods_are_utc_days_and_months(period: BudgetPeriod, now: str, name: str, begins: str, ends: str) -> None:
    found = period_at(period, seconds(now))
    assert (found.name, found.begins, found.ends) == (name, seconds(begins), seconds(ends))


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
