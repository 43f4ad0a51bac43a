"""The audit log: what operators changed, written in the transaction of the change and never again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import InvalidValue
from serve_app.ledger.messages import Audit, AuditRecord
from serve_app.ledger.schema import audit_log
from serve_app.ledger.snapshots import check_page


def write_audit(
    transaction: Transaction,
    audit: Audit | None,
    action: str,
    *,
    subject: str,
    account_id: str,
    detail: Mapping[str, Any],
    now: float,
) -> None:
    """Record a change that the transaction makes; nothing without an `audit`. The detail never holds a secret."""
    if audit is None:
        return
    for what, text in (("an actor", audit.actor), ("a request id", audit.request_id), ("an address", audit.address)):
        if text is None and what != "an actor":
            continue
        if not isinstance(text, str) or not 1 <= len(text) <= 200 or not text.isprintable():
            raise InvalidValue(f"{text!r}: {what} has 1 to 200 printable characters")
    transaction.connection.execute(
        insert(audit_log).values(
            id=transaction.next_audit(),
            at=now,
            actor=audit.actor,
            action=action,
            subject=subject,
            account_id=account_id,
            detail=json.dumps(detail, ensure_ascii=False, separators=(",", ":"), allow_nan=False),
            request_id=audit.request_id,
            address=audit.address,
        )
    )


def changed(before: object, after: object, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The fields of two snapshots that differ, as {"was": …, "is": …}."""
    found = {}
    for name in names:
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            found[name] = {"was": was, "is": now}
    return found


def read_audit(connection: Connection, *, account_id: str | None, after: int | None, limit: int) -> list[AuditRecord]:
    """See `Ledger.audit_log`."""
    query = select(audit_log).order_by(audit_log.c.id.desc()).limit(check_page(limit))
    if account_id is not None:
        query = query.where(audit_log.c.account_id == account_id)
    if after is not None:
        query = query.where(audit_log.c.id < after)
    return [
        AuditRecord(
            audit_id=row.id,
            at=row.at,
            actor=row.actor,
            action=row.action,
            subject=row.subject,
            account_id=row.account_id,
            detail=json.loads(row.detail),
            request_id=row.request_id,
            address=row.address,
        )
        for row in connection.execute(query)
    ]
