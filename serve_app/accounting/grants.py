"""Unspent grants, and the order in which requests spend them.

Grants that expire soonest are spent first, grants without an expiry last, and all of them before the top-ups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select, update

from serve_app.accounting.schema import grants

_LEFT = select(grants).where(grants.c.account_id.in_(bindparam("ids", expanding=True)), grants.c.remaining > 0)
_SET_REMAINING = update(grants).where(grants.c.entry_id == bindparam("grant")).values(remaining=bindparam("has"))


@dataclass(slots=True)
class Lot:
    """The remainder of one grant while a batch is computed."""

    grant_id: int
    left: int  # nano-units
    expires_at: float | None
    touched: bool = False

    def pays_for(self, started_at: float) -> bool:
        """Returns whether a request that started at this Unix time may spend the grant."""
        return self.expires_at is None or started_at < self.expires_at


def payable(lots: Iterable[Lot], started_at: float) -> int:
    """Returns the nano-units of the lots that a request may spend if it started at this Unix time."""
    return sum(lot.left for lot in lots if lot.pays_for(started_at))


def spend(lots: Sequence[Lot], amount: int, started_at: float) -> None:
    """Takes `amount`, at most the `payable` amount, from lots in the order of `read_lots`."""
    for lot in lots:
        if not amount:
            return
        if lot.left and lot.pays_for(started_at):
            part = min(amount, lot.left)
            lot.left -= part
            lot.touched = True
            amount -= part
    if amount:
        raise AssertionError(f"{amount} nano-units more than the grants hold")


def read_lots(connection: Connection, account_ids: Collection[str]) -> dict[str, list[Lot]]:
    """Returns the unspent grants of these accounts, in spending order."""
    lots_of: dict[str, list[Lot]] = {}
    for row in connection.execute(_LEFT, {"ids": list(account_ids)}):
        lots_of.setdefault(row.account_id, []).append(Lot(row.entry_id, row.remaining, row.expires_at))
    for lots in lots_of.values():
        lots.sort(key=lambda lot: (math.inf if lot.expires_at is None else lot.expires_at, lot.grant_id))
    return lots_of


def write_remaining(connection: Connection, remaining: Mapping[int, int]) -> None:
    """Sets the remainders of grants, in nano-units by grant id. The mapping must not be empty."""
    connection.execute(_SET_REMAINING, [{"grant": grant_id, "has": left} for grant_id, left in remaining.items()])
