"""Converts decimal strings to integer nano-units and back, exactly or not at all.

Floats are rejected: 0.1 is not a tenth. A nano-unit is 1e-9 of the account's currency.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from functools import lru_cache

from serve_app.contracts.errors import InvalidAmount

NANO_PER_UNIT = 10**9
TOKENS_PER_PRICE = 10**6
EXACT_PLACES = 9  # decimal places of a nano-unit
MINUS = "\N{MINUS SIGN}"  # in amounts for people; format_amount uses a hyphen
NANO_PER_TOKEN_PER_UNIT = NANO_PER_UNIT // TOKENS_PER_PRICE  # "1.00 per million" is 1,000 nano-units per token

# 64-bit columns hold 9.2e18. These limits keep every balance, and the sum of all balances, far below that.
MAX_AMOUNT = 10**17  # per credit: 100 million units
MAX_BALANCE = 10**18  # per account: a billion units
MAX_CHARGE = 10**15  # per request: a million units

# Decimal() itself accepts "NaN", "1_000", " 1 " and digits of every script. This pattern does not.
_DECIMAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?", re.ASCII)


def parse_amount(text: str, *, negative: bool = False) -> int:
    """Returns the nano-units of a decimal such as "12.50".

    Raises InvalidAmount for anything but a plain decimal with at most nine decimal places, for amounts above 100
    million, and for negative amounts unless `negative` allows them.
    """
    nano = _exact(text, NANO_PER_UNIT, "an amount has at most 9 decimals")
    if nano < 0 and not negative:
        raise InvalidAmount(f"{text!r} is negative: use an amount of at least 0")
    if abs(nano) > MAX_AMOUNT:
        raise InvalidAmount(f"{text!r} is too large: the maximum is {format_amount(MAX_AMOUNT)}")
    return nano


def format_amount(nano: int) -> str:
    """Returns the exact decimal of nano-units with at least two decimal places, e.g. "12.50" or "0.000000001"."""
    return _decimal(nano, 9)


def places_of(amounts: Iterable[int]) -> int:
    """Returns the number of decimal places, at least 2, at which all the amounts are exact."""
    return max((len(format_amount(nano).partition(".")[2]) for nano in amounts), default=2)


def summing_places(amounts: Sequence[int]) -> int:
    """Returns the fewest decimal places, at least 2, at which rounded amounts add up and no amount but 0 becomes 0."""
    for places in range(2, EXACT_PLACES):
        step = 10 ** (EXACT_PLACES - places)
        rounded = [_steps(nano, step) for nano in amounts]
        if sum(rounded) == _steps(sum(amounts), step) and rounded.count(0) == amounts.count(0):
            return places
    return EXACT_PLACES


def listing_places(amounts: Sequence[int]) -> int:
    """Returns the decimal places for a list of sums: 2, or `summing_places` if an amount other than 0 is below 0.01."""
    return summing_places(amounts) if any(0 < abs(nano) < NANO_PER_UNIT // 100 for nano in amounts) else 2


def fixed_amount(nano: int, places: int) -> str:
    """Returns an amount for people, rounded to a number of decimal places: "−1,234.50"."""
    rounded = (Decimal(nano) / NANO_PER_UNIT).quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN)
    return f"{rounded + 0:,f}".replace("-", MINUS)  # + 0: zero has no sign


@lru_cache(maxsize=1024)  # a few prices, needed by every request
def price_per_million(text: str) -> int:
    """Returns the nano-units per token of a price per million tokens: "0.27" is 270.

    Raises InvalidAmount for more than three decimal places: 0.0005 per million would be half a nano-unit per token, and
    a charge must be a whole number.
    """
    nano = _exact(
        text,
        NANO_PER_TOKEN_PER_UNIT,
        "a price per million tokens has at most 3 decimals (0.001 per million is 1 nano-unit per token)",
    )
    if nano < 0:
        raise InvalidAmount(f"{text!r} is negative: a price is at least 0")
    if nano > MAX_CHARGE // TOKENS_PER_PRICE:
        raise InvalidAmount(f"{text!r} is too large: a price is at most 1,000,000 per million tokens")
    return nano


def format_price(nano_per_token: int) -> str:
    """Returns the price per million tokens, e.g. "0.27" for 270."""
    return _decimal(nano_per_token, 3)


def _exact(text: str, scale: int, too_fine: str) -> int:
    if not isinstance(text, str):
        raise InvalidAmount(f"{text!r} is not a string: write amounts as decimal strings such as '12.50'")
    if not _DECIMAL.fullmatch(text):
        raise InvalidAmount(f"{text[:60]!r} is not a valid amount: use a plain decimal such as '12.50'")
    numerator, denominator = Decimal(text).as_integer_ratio()
    scaled, rest = divmod(numerator * scale, denominator)
    if rest:
        raise InvalidAmount(f"{text!r} has too many decimal places: {too_fine}")
    return scaled


def _steps(nano: int, step: int) -> int:
    return int((Decimal(nano) / step).to_integral_value(ROUND_HALF_EVEN))


def _decimal(scaled: int, places: int) -> str:
    whole, fraction = divmod(abs(scaled), 10**places)
    digits = f"{fraction:0{places}d}".rstrip("0").ljust(2, "0")
    return f"{'-' if scaled < 0 else ''}{whole}.{digits}"


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in nano-units per token."""

    input: int
    cached_input: int
    output: int

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Returns the cost in nano-units. Cached tokens are part of the prompt and have a separate price."""
        uncached = prompt_tokens - cached_tokens
        return uncached * self.input + cached_tokens * self.cached_input + completion_tokens * self.output


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """The price of an identifier from `effective_at` on."""

    identifier: str
    version: int
    effective_at: float
    price: Price


def price_at(prices: Sequence[PriceVersion], now: float, configured: Price | None = None) -> Price:
    """Returns the price in effect. `prices` are ordered by (effective_at, version); at equal times the last applies.

    Before the first of them, the configured price applies. Without a configured price, the first of `prices` applies
    even before its time, because the clocks of two machines differ.
    """
    for one in reversed(prices):
        if one.effective_at <= now:
            return one.price
    return prices[0].price if configured is None else configured
