"""Amounts of money as they are typed, turned into the plain decimal strings that the API takes."""

from __future__ import annotations

import secrets
from decimal import Decimal, InvalidOperation
from typing import Annotated

import typer

from serve_app.cli.errors import usage_error

MAX_DECIMALS = 9  # the ledger counts in billionths

IdempotencyKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Repeat an earlier attempt without doing it twice.")
]


def amount_of(text: str, *, signed: bool = False) -> str:
    """A sum above 0, or with `signed` any but 0. Raises a usage error."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise usage_error(f"{text!r} is not an amount: write it like 5 or 0.25") from None
    if signed and amount.is_finite() and amount == 0:
        raise usage_error(f"the amount must not be 0, as {text} is")
    if not amount.is_finite() or (amount <= 0 and not signed):
        raise usage_error(f"the amount must be above 0, not {text}")
    exponent = amount.normalize().as_tuple().exponent
    if isinstance(exponent, int) and -exponent > MAX_DECIMALS:
        raise usage_error(f"{text} has more than {MAX_DECIMALS} decimals")
    return f"{amount:f}"


def fresh_key() -> str:
    """An idempotency key that nobody has used."""
    return secrets.token_hex(16)
