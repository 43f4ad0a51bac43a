"""The audit log: changes, operators' reads, and new prices.

A change is recorded in the transaction that makes it. Records are never changed. Records about the service as a whole
have an empty account.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, func, insert, select

from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import LONG_S, reads, writes
from serve_app.accounting.schema import audit_log, head
from serve_app.accounting.validation import check_name, check_page, equals, is_text
from serve_app.contracts.books import AccountSnapshot, Audit, AuditRecord, KeySnapshot
from serve_app.contracts.commands import MAX_SEARCHED, ListAudit, RecordAudit, RecordPrices
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.limits import ACCOUNT_LIMITS

SET_PRICE = "set_price"
_AS_STORED = ("at", "actor", "action", "subject", "account_id", "request_id", "address")


def write_audit(
    transaction: Transaction,
    audit: Audit | None,
    action: str,
    account_id: str,
    detail: Mapping[str, Any],
    now: float,
    *,
    key_id: str | None = None,
    subject: str | None = None,
) -> None:
    """Records a change that the transaction makes to an account, or to its key `key_id`. Does nothing without `audit`.

    `detail` must not contain a secret.
    """
    if audit is None:
        return
    for what, text in (("an actor", audit.actor), ("a request id", audit.request_id), ("an address", audit.address)):
        if not is_text(text, 200) and (text is not None or what == "an actor"):
            raise InvalidValue(f"{text!r}: {what} has 1 to 200 printable characters")
    transaction.connection.execute(
        insert(audit_log).values(
            **asdict(audit),
            id=transaction.next_audit(),
            at=now,
            action=action,
            subject=subject or key_id or account_id,
            account_id=account_id,
            detail=json.dumps(detail, ensure_ascii=False, separators=(",", ":"), allow_nan=False),
        )
    )


@writes(RecordAudit)
def record_audit(transaction: Transaction, wanted: RecordAudit, now: float) -> None:
    for what, text in (("an action", wanted.action), ("a subject", wanted.subject)):
        if not is_text(text, 200):
            raise InvalidValue(f"{text!r}: {what} has 1 to 200 printable characters")
    write_audit(transaction, wanted.audit, wanted.action, wanted.account_id, wanted.detail, now, subject=wanted.subject)


@writes(RecordPrices)
def record_prices(transaction: Transaction, wanted: RecordPrices, now: float) -> None:
    """Records changed prices. Several gateways report the same prices; only the first report is written."""
    for model, price in wanted.prices.items():
        query = (
            select(audit_log.c.detail)
            .where(audit_log.c.account_id == "", audit_log.c.action == SET_PRICE, audit_log.c.subject == model)
            .order_by(audit_log.c.id.desc())
            .limit(1)
        )
        last = transaction.connection.execute(query).scalar_one_or_none()
        was = None if last is None else {name: change["is"] for name, change in json.loads(last).items()}
        new = asdict(price)
        if new != was:
            detail = {name: {"was": was and was[name], "is": value} for name, value in new.items()}
            write_audit(transaction, wanted.audit, SET_PRICE, "", detail, now, subject=model)


def value_of(snapshot: AccountSnapshot | KeySnapshot, name: str) -> Any:
    """Returns a field of a snapshot, or one of its limits. A limit that is not set is None."""
    return snapshot.limits.get(name) if name in ACCOUNT_LIMITS else getattr(snapshot, name)


def changed(
    before: AccountSnapshot | KeySnapshot, after: AccountSnapshot | KeySnapshot, names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns the fields among `names` that differ, as {"was": …, "is": …}."""
    values = {name: (value_of(before, name), value_of(after, name)) for name in names}
    return {name: {"was": was, "is": now} for name, (was, now) in values.items() if was != now}


@reads(ListAudit, timeout_s=LONG_S)
def list_audit(connection: Connection, wanted: ListAudit, _now: float) -> list[AuditRecord]:
    query = select(audit_log).order_by(audit_log.c.id.desc()).limit(check_page(wanted.limit))
    if wanted.account_id is not None:
        query = query.where(equals(audit_log.c.account_id, wanted.account_id))
    if wanted.after is not None:
        query = query.where(audit_log.c.id < wanted.after)
    if wanted.actor is not None or wanted.action is not None:
        # Actor and action are not indexed. Ids have no gaps, so a range of ids limits the number of rows read.
        end = select(head.c.audit + 1).scalar_subquery() if wanted.after is None else wanted.after
        query = query.where(audit_log.c.id >= end - MAX_SEARCHED)
    if wanted.actor is not None:
        check_name(wanted.actor, "an actor")
        query = query.where(func.lower(audit_log.c.actor).contains(wanted.actor.lower(), autoescape=True))
    if wanted.action is not None:
        query = query.where(equals(audit_log.c.action, wanted.action))
    return [
        AuditRecord(audit_id=row.id, detail=json.loads(row.detail), **{name: row._mapping[name] for name in _AS_STORED})
        for row in connection.execute(query)
    ]
