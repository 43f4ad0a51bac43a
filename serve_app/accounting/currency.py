"""The ledger's currency. Prices have no separate currency: an account in a different one would be charged 1:1."""

from __future__ import annotations

from sqlalchemy import Connection, false, func, select, update

from serve_app.accounting.database import Transaction
from serve_app.accounting.schema import accounts, head
from serve_app.contracts.errors import OtherCurrency

#: Whether the currency of a row of `accounts`, joined with the head, differs from the ledger's.
IS_FOREIGN = func.coalesce(accounts.c.currency != head.c.currency, false()).label("is_foreign")


def read_currency(connection: Connection) -> str | None:
    """Returns the ledger's currency, or None if no service has set it yet."""
    currency: str | None = connection.execute(select(head.c.currency)).scalar_one()
    return currency


def claim_currency(transaction: Transaction, currency: str) -> None:
    """Sets the ledger's currency if it has none yet. Raises OtherCurrency if it has a different one.

    A ledger of an earlier release has the currency of its accounts. If an operator changed the setting meanwhile, there
    are accounts in both currencies. Either currency is then accepted once, and accounts in the other are no longer
    served.
    """
    connection = transaction.connection
    stored = read_currency(connection)
    found = {stored} if stored is not None else set(connection.scalars(select(accounts.c.currency).distinct()))
    if found and currency not in found:
        raise OtherCurrency(
            f"this ledger is kept in {', '.join(sorted(found))} and args.currency is {currency}: set it back, or name "
            "another database for another currency; what is on the books can't be converted"
        )
    if stored is None:
        connection.execute(update(head).values(currency=currency))


def check_currency(connection: Connection, currency: str, whose: str) -> None:
    """Raises OtherCurrency unless `currency` is the ledger's."""
    own = read_currency(connection)
    if own not in (None, currency):
        raise OtherCurrency(f"{whose} is in {currency}, and this ledger is kept in {own}")


def foreign_accounts(connection: Connection, account_ids: list[str]) -> set[str]:
    """Returns the accounts among these whose currency differs from the ledger's."""
    query = select(accounts.c.id).join(head, head.c.id == 1).where(accounts.c.id.in_(account_ids), IS_FOREIGN)
    return set(connection.scalars(query)) if account_ids else set()
