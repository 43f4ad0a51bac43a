"""The ledger's currency. Prices have no separate currency, so all accounts must use the ledger's."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from serve_app.accounting.database import Transaction
from serve_app.accounting.schema import accounts, head
from serve_app.contracts.errors import OtherCurrency


def read_currency(connection: Connection) -> str | None:
    """Returns the ledger's currency, or None if no service has set it yet."""
    currency: str | None = connection.execute(select(head.c.currency)).scalar_one()
    return currency


def claim_currency(transaction: Transaction, currency: str) -> None:
    """Sets the ledger's currency if it has none yet.

    Raises OtherCurrency if the ledger has another currency, or if it has none and only accounts in other currencies.
    """
    connection = transaction.connection
    stored = read_currency(connection)
    found = {stored} if stored is not None else set(connection.scalars(select(accounts.c.currency).distinct()))
    if found and currency not in found:
        raise OtherCurrency(
            f"this ledger is kept in {', '.join(sorted(found))} and args.currency is {currency}: set it back, or use a "
            "new database for the other currency; the amounts in a ledger cannot be converted"
        )
    if stored is None:
        connection.execute(update(head).values(currency=currency))


def check_currency(connection: Connection, currency: str) -> None:
    """Raises OtherCurrency unless a new account may have this currency."""
    own = read_currency(connection)
    if own not in (None, currency):
        raise OtherCurrency(f"the new account is in {currency}, and this ledger is kept in {own}")
