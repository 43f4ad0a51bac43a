"""Grants: money that was given, each with what is left of it, and in which order they are spent.

The soonest to expire goes first, those that never expire go last, and all of them before the top-ups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from serve_app.ledger import journal
from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import InvalidValue
from serve_app.ledger.journal import Entry, EntryKind
from serve_app.ledger.messages import GrantSnapshot
from serve_app.ledger.schema import accounts, grants, journal_entries

#: Seconds from a grant's expiry until its rest leaves the books. A request that began before may still be paid from it:
#: requests run for minutes, and their settlements may wait in a gateway's spool while the database is away.
GRACE_S = 3600.0
MAX_EXPIRED = 10_000

_LEFT = select(grants).where(grants.c.account_id.in_(bindparam("ids", expanding=True)), grants.c.remaining > 0)
_SET_REMAINING = update(grants).where(grants.c.entry_id == bindparam("grant")).values(remaining=bindparam("has"))


@dataclass(slots=True)
class Lot:
    """What is left of one grant while a batch is worked out."""

    grant_id: int
    left: int  # nano-units
    expires_at: float | None
    touched: bool = False

    def pays_for(self, started_at: float) -> bool:
        """Whether a request that started then may spend it."""
        return self.expires_at is None or started_at < self.expires_at


def spendable(lots: Iterable[Lot], started_at: float) -> int:
    """Nano-units that a request that started then may spend."""
    return sum(lot.left for lot in lots if lot.pays_for(started_at))


def take(lots: Sequence[Lot], amount: int, started_at: float) -> None:
    """Spend `amount` of what is `spendable`. The lots come in their order, as `read_lots` gives them."""
    for lot in lots:
        if not amount:
            return
        if lot.left and lot.pays_for(started_at):
            taken = min(amount, lot.left)
            lot.left -= taken
            lot.touched = True
            amount -= taken
    if amount:
        raise AssertionError(f"{amount} nano-units more than the grants hold")


def read_lots(connection: Connection, account_ids: Collection[str]) -> dict[str, list[Lot]]:
    """The grants of these accounts that have something left, in the order in which they are spent."""
    found: dict[str, list[Lot]] = {}
    if not account_ids:
        return found
    for row in connection.execute(_LEFT, {"ids": list(account_ids)}):
        found.setdefault(row.account_id, []).append(Lot(row.entry_id, row.remaining, row.expires_at))
    for lots in found.values():
        lots.sort(key=lambda lot: (math.inf if lot.expires_at is None else lot.expires_at, lot.grant_id))
    return found


def write_lots(connection: Connection, lots: Iterable[Lot]) -> None:
    """Keep what is left of the lots that were taken from."""
    changed = [{"grant": lot.grant_id, "has": lot.left} for lot in lots if lot.touched]
    if changed:
        connection.execute(_SET_REMAINING, changed)


def expiring(connection: Connection, account_ids: Collection[str]) -> dict[str, tuple[tuple[float, int], ...]]:
    """AccountSnapshot.expiring of those of the accounts that have any."""
    lots = read_lots(connection, account_ids)
    found = {
        account_id: tuple((lot.expires_at, lot.left) for lot in mine if lot.expires_at is not None)
        for account_id, mine in lots.items()
    }
    return {account_id: rests for account_id, rests in found.items() if rests}


def add_grant(connection: Connection, entry_id: int, account_id: str, amount: int, expires_at: float | None) -> None:
    """The grant of a journal entry that gives `amount`."""
    connection.execute(
        insert(grants).values(
            entry_id=entry_id, account_id=account_id, amount=amount, remaining=amount, expires_at=expires_at
        )
    )


def list_grants(connection: Connection, account_id: str) -> list[GrantSnapshot]:
    """See `Ledger.grants`."""
    entry = journal_entries.c
    query = (
        select(grants, entry.created_at, entry.memo)
        .select_from(grants.join(journal_entries))
        .where(grants.c.account_id == account_id)
        .order_by(grants.c.entry_id)
    )
    return [
        GrantSnapshot(row.entry_id, row.amount, row.remaining, row.created_at, row.expires_at, row.memo)
        for row in connection.execute(query)
    ]


def expire_grants(transaction: Transaction, limit: int, *, now: float) -> int:
    """See `Ledger.expire_grants`."""
    if type(limit) is not int or not 1 <= limit <= MAX_EXPIRED:
        raise InvalidValue(f"limit {limit!r}: expire 1 to {MAX_EXPIRED} grants at once")
    connection = transaction.connection
    query = (
        select(grants.c.entry_id, grants.c.account_id, grants.c.remaining)
        .where(grants.c.remaining > 0, grants.c.expires_at <= now - GRACE_S)
        .order_by(grants.c.expires_at, grants.c.entry_id)
        .limit(limit)
    )
    entries: list[Entry] = []
    expired: list[dict[str, Any]] = []
    totals: dict[str, int] = {}
    for row in connection.execute(query):
        moved = {journal.granted(row.account_id): -row.remaining, journal.FUNDS_EXPIRED: row.remaining}
        memo = f"grant {row.entry_id}"
        entries.append(Entry(transaction.next_entry(), EntryKind.EXPIRY, row.account_id, now, moved, memo))
        expired.append({"grant": row.entry_id, "has": 0})
        totals[row.account_id] = totals.get(row.account_id, 0) + row.remaining
    if expired:
        journal.write(connection, entries)
        connection.execute(_SET_REMAINING, expired)
        connection.execute(
            update(accounts)
            .where(accounts.c.id == bindparam("account"))
            .values(granted=accounts.c.granted - bindparam("rest"), version=bindparam("next")),
            [
                {"account": account_id, "rest": rest, "next": transaction.next_version()}
                for account_id, rest in totals.items()
            ],
        )
    return len(expired)
