"""Operators of the console: their roles, and credits that need two of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import operator_roles, pending_credits
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import add_credit
from serve_app.accounting.people import end_sessions, find_person, read_person
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, equals
from serve_app.contracts.commands import AddCredit
from serve_app.contracts.errors import InvalidAmount, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.operators import (
    ROLES,
    AskCredit,
    DecideCredit,
    ListPendingCredits,
    PendingCredit,
    SetOperatorRole,
)
from serve_app.contracts.people import FindPerson, Person


def set_operator_role(transaction: Transaction, wanted: SetOperatorRole, now: float) -> Person:
    connection = transaction.connection
    if wanted.role is not None and wanted.role not in ROLES:
        raise InvalidValue(f"role {wanted.role!r}: give one of {', '.join(ROLES)}")
    before = find_person(connection, FindPerson(wanted.email), now)
    if before is None:
        raise InvalidValue(
            f"nobody has the address {wanted.email!r} yet: invite the person first; the invitation must be accepted"
        )
    if wanted.role is not None and wanted.account_id not in before.roles:
        raise InvalidValue(
            f"{before.email} is no member of {wanted.account_id or 'an account that you name'}, and others may have "
            "accepted an invitation of this address: invite the person to an account of your staff's, and name that "
            "when they have joined it"
        )
    if before.operator_role != wanted.role:
        connection.execute(delete(operator_roles).where(operator_roles.c.user_id == before.user_id))
        if wanted.role is not None:
            connection.execute(insert(operator_roles).values(user_id=before.user_id, role=wanted.role))
        end_sessions(connection, before.user_id, "", now)
        detail = {"role": {"was": before.operator_role, "is": wanted.role}}
        write_audit(transaction, wanted.audit, "set_operator_role", "", detail, now, subject=before.user_id)
    return read_person(connection, before.user_id)


def ask_credit(transaction: Transaction, wanted: AskCredit, now: float) -> PendingCredit:
    connection = transaction.connection
    read_account(connection, wanted.account_id)
    if type(wanted.amount) is not int or not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{wanted.amount!r} nano-units: credit more than 0 and at most {MAX_AMOUNT} at once")
    if wanted.kind not in ("top_up", "grant"):
        raise InvalidValue(f"{wanted.kind!r}: a credit is a 'top_up' or a 'grant'")
    if wanted.memo:
        check_name(wanted.memo, "a memo", longest=400)
    pending_id, detail = new_id("pending_"), {"amount": wanted.amount, "kind": wanted.kind, "memo": wanted.memo}
    asked = {"account_id": wanted.account_id, "asked_by": wanted.audit.actor, "asked_at": now}
    connection.execute(insert(pending_credits).values(id=pending_id, **detail, **asked))
    write_audit(transaction, wanted.audit, "ask_credit", wanted.account_id, detail, now, subject=pending_id)
    return _pending(connection.execute(select(pending_credits).where(pending_credits.c.id == pending_id)).one())


def list_pending_credits(connection: Connection, _wanted: ListPendingCredits, _now: float) -> list[PendingCredit]:
    query = select(pending_credits).where(pending_credits.c.decided_at.is_(None))
    return [_pending(row) for row in connection.execute(query.order_by(pending_credits.c.asked_at))]


def decide_credit(transaction: Transaction, wanted: DecideCredit, now: float) -> bool:
    connection, audit = transaction.connection, wanted.audit
    query = select(pending_credits).where(equals(pending_credits.c.id, wanted.pending_id))
    row = connection.execute(query).one_or_none()
    if row is None or row.decided_at is not None:
        return False
    if wanted.approved and row.asked_by == audit.actor:
        raise InvalidValue("who asked for a credit can't approve it: another operator does")
    decided = {"decided_by": audit.actor, "decided_at": now, "approved": wanted.approved}
    connection.execute(update(pending_credits).where(pending_credits.c.id == row.id).values(**decided))
    detail = {"amount": row.amount, "kind": row.kind, "asked_by": row.asked_by, "approved": wanted.approved}
    write_audit(transaction, audit, "decide_credit", row.account_id, detail, now, subject=row.id)
    if wanted.approved:
        memo = f"{row.memo} (asked for by {row.asked_by})" if row.memo else f"asked for by {row.asked_by}"
        credit = AddCredit(row.account_id, row.amount, row.kind, idempotency_key=row.id, memo=memo, audit=audit)
        add_credit(transaction, credit, now)
    return True


def _pending(row: Row[Any]) -> PendingCredit:
    return PendingCredit(row.id, row.account_id, row.amount, row.kind, row.memo, row.asked_by, row.asked_at)
