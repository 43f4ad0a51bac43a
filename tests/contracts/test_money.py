"""Money is exact or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.money import MAX_AMOUNT, format_amount, format_price, parse_amount, price_per_million


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("0", 0),
        ("12.50", 12_500_000_000),
        ("0.000000001", 1),
        ("0.1000000000", 100_000_000),
        ("1e3", 1_000_000_000_000),
        ("+2", 2_000_000_000),
        ("100000000", MAX_AMOUNT),
    ],
)
def test_a_decimal_is_read_exactly(text: str, nano: int) -> None:
    assert parse_amount(text) == nano


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " 1",
            "1 ",
            "1_000",
            "1,5",
            "NaN",
            "inf",
            "-1",
            "0.0000000001",
            "1e99",
            "1e-99",
            "1e9999999",
            "١",
            "0x10",
        ),
        *("100000000.000000001", ".5", "1.", "9" * 100, 0.1, 1, None),
    ],
)
def test_an_amount_that_is_not_exact_is_refused(text: str) -> None:
    with pytest.raises(InvalidAmount):
        parse_amount(text)


@given(st.integers(-MAX_AMOUNT, MAX_AMOUNT))
def test_an_amount_survives_being_written_and_read(nano: int) -> None:
    assert parse_amount(format_amount(nano), negative=True) == nano


def test_a_price_per_million_is_whole_nano_units_per_token() -> None:
    assert price_per_million("0.27") == 270
    assert price_per_million("0.001") == 1
    assert format_price(270) == "0.27"
    assert format_price(1) == "0.001"
    assert format_amount(12_500_000_000) == "12.50"


def test_a_price_with_more_than_three_decimals_is_refused_and_says_so() -> None:
    with pytest.raises(InvalidAmount, match="at most 3 decimals"):
        price_per_million("0.0005")
    with pytest.raises(InvalidAmount):
        price_per_million("-1")
