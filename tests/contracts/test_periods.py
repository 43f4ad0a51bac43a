"""Budget periods are days and months of UTC."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from serve_app.contracts.periods import BudgetPeriod, period_at


@pytest.mark.parametrize(
    ("period", "now", "name", "ends"),
    [
        ("day", "2026-11-30T23:59:59", "2026-11-30", "2026-12-01"),
        ("day", "2026-12-01T00:00:00", "2026-12-01", "2026-12-02"),
        ("month", "2026-11-30T23:59:59", "2026-11", "2026-12-01"),
        ("month", "2026-12-31T12:00:00", "2026-12", "2027-01-01"),
        ("month", "2028-02-29T00:00:00", "2028-02", "2028-03-01"),
    ],
)
def test_periods_are_utc_days_and_months(period: BudgetPeriod, now: str, name: str, ends: str) -> None:
    at = datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()
    found = period_at(period, at)
    assert (found.name, found.ends) == (name, datetime.fromisoformat(ends).replace(tzinfo=UTC).timestamp())
    assert found.begins <= at < found.ends
