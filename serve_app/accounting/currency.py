"""The ledger's currency. Prices have none of their own: of an account in another one they would be charged 1:1."""

from __future__ import annotations

from sqlalchemy import Connection, false, func, select, update

from serve_app.accounting.database import Transaction
from serve_app.accounting.schema import accounts, head
from serve_app.contracts.errors import OtherCurrency

#: Whether a row of `accounts`, joined with the head, is kept in another currency than the ledger's.
IS_FOREIGN = func.coalesce(accounts.c.currency != head.c.currency, false()).label("is_foreign")


def read_currency(connection: Connection) -> str | None:
    """None: no service has named it yet."""
    currency: str | None = connection.execute(select(head.c.currency)).scalar_one()
    return currency


def claim_currency(transaction: Transaction, currency: str) -> None:
    """Makes `currency` the ledger's, if it has none yet. Raises OtherCurrency when it has another one.

    A ledger of an earlier release has the currency of its accounts. If an operator had changed the setting meanwhile,
    there are accounts of both: then either is accepted once, and accounts of the other are not served any more.
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
    """Those of these accounts that are kept in another currency than the ledger's."""
    query = select(accounts.c.id).join(head, head.c.id == 1).where(accounts.c.id.in_(account_ids), IS_FOREIGN)
    return set(connection.scalars(query)) if account_ids else set()
