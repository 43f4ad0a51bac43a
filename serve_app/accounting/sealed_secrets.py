"""Lists sealed secrets, and replaces them when the secret key is rotated."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table, select, update

from serve_app.accounting.console_tables import alerts, notices, users
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.sealed_secrets import ListSealed, Reseal, SealedSecret
from serve_app.storage.sealing import of_totp, of_webhooks

PAGE: Final = 200
_TABLES: Final[dict[str, tuple[Table, Any]]] = {
    "users": (users, users.c.totp_secret),
    "alerts": (alerts, alerts.c.secret),
    "notices": (notices, notices.c.secret),
}


@reads(ListSealed)
def list_sealed(connection: Connection, wanted: ListSealed, _now: float) -> tuple[list[SealedSecret], str | None]:
    """Lists sealed secrets. `after` has the table name and row id of the last secret of the previous page."""
    at, _, after = wanted.after.partition(" ")
    names = list(_TABLES)
    found: list[SealedSecret] = []
    for name in names[names.index(at) if at in names else 0 :]:
        table, column = _TABLES[name]
        owner = table.c.id if table is users else table.c.account_id
        query = select(table.c.id, owner.label("owner"), column.label("stored")).where(
            column.is_not(None), column != ""
        )
        if table is notices:
            query = query.where(notices.c.next_at.is_not(None))  # the others are never sent again
        if name == at and after.isprintable():
            query = query.where(table.c.id > after)
        purpose = of_totp if table is users else of_webhooks
        for row in connection.execute(query.order_by(table.c.id).limit(PAGE - len(found))):
            found.append(SealedSecret(name, row.id, purpose(row.owner), row.stored))  # type: ignore[arg-type]
        if len(found) == PAGE:
            return found, f"{name} {found[-1].row_id}"
    return found, None


@writes(Reseal)
def reseal(transaction: Transaction, wanted: Reseal, _now: float) -> int:
    if len(wanted.sealed) != len(wanted.resealed):
        raise InvalidValue(f"{len(wanted.resealed)} texts for {len(wanted.sealed)} secrets: give one for each")
    changed = 0
    for one, resealed in zip(wanted.sealed, wanted.resealed, strict=True):
        table, column = _TABLES[one.table]
        # A secret that has changed meanwhile is not replaced.
        same = (table.c.id == one.row_id, column == one.stored)
        changed += transaction.connection.execute(update(table).where(*same).values({column.name: resealed})).rowcount
    return changed
