"""Times and amounts as operators type them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from serve_app.cli.output import CommandError
from serve_app.cli.values import parse_expiry, plain_amount

NOW = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("30d", "2026-12-21T18:00:00Z"),
        ("12h", "2026-11-22T06:00:00Z"),
        ("4w", "2026-12-19T18:00:00Z"),
        ("90min", "2026-11-21T19:30:00Z"),
        ("2026-12-31", "2027-01-01T00:00:00Z"),
        ("2026-11-21", "2026-11-22T00:00:00Z"),
        ("2026-12-31T18:00:00Z", "2026-12-31T18:00:00Z"),
        ("2026-12-31T18:00:00+02:00", "2026-12-31T16:00:00Z"),
    ],
)
def test_an_expiry_is_a_duration_a_day_to_its_end_or_a_time(text: str, at: str) -> None:
    assert parse_expiry(text, NOW) == at


@pytest.mark.parametrize(
    "text",
    ["", "30", "0d", "-1d", "1.5d", "6m", "1y", "999999w", "tomorrow", "2026-13-01", "2026-12-31T18:00:00",
     "9999-12-31T23:59:59-10:00", "2026-11-20", "2026-11-21T18:00:00Z", "٣d"],
)  # fmt: skip
def test_an_expiry_that_is_invalid_or_has_passed_is_a_usage_error(text: str) -> None:
    with pytest.raises(CommandError) as refused:
        parse_expiry(text, NOW)
    assert refused.value.exit_code == 2
    assert "--expires" in refused.value.message


@pytest.mark.parametrize(
    ("text", "sent"), [("-5", "-5"), ("1e2", "100"), ("-0.000000001", "-0.000000001"), ("+2", "2")]
)
def test_a_correction_has_a_sign(text: str, sent: str) -> None:
    assert plain_amount(text, signed=True) == sent


@pytest.mark.parametrize("text", ["12345678.123456789", "99999999.999999999"])
def test_an_amount_with_more_digits_than_a_float_keeps_is_exact(text: str) -> None:
    assert plain_amount(text) == text
    assert plain_amount(f"-{text}", signed=True) == f"-{text}"


@pytest.mark.parametrize("text", ["0", "-0.0", "NaN", "-Infinity", "-0.0000000001", "five", ""])
def test_a_correction_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(CommandError):
        plain_amount(text, signed=True)
