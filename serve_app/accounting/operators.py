"""Operators of the console: their roles, and credits that need two operators."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import operator_roles, pending_credits
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import add_credit
from serve_app.accounting.people import end_sessions, find_person, read_person
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, check_page, equals
from serve_app.contracts.commands import AddCredit
from serve_app.contracts.errors import Conflict, InvalidAmount, InvalidValue
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
from serve_app.contracts.units import DAY_S


@writes(SetOperatorRole)
def set_operator_role(transaction: Transaction, wanted: SetOperatorRole, now: float) -> Person:
    connection = transaction.connection
    if wanted.role is not None and wanted.role not in ROLES:
        raise InvalidValue(f"role {wanted.role!r}: give one of {', '.join(ROLES)}")
    before = find_person(connection, FindPerson(wanted.email), now)
    if before is None:
        raise InvalidValue(
            f"no person has the address {wanted.email!r} yet: invite the person first; the invitation must be accepted"
        )
    if wanted.role is not None and wanted.account_id not in before.roles:
        missing = (
            f"account_id is missing: name a staff account of which {before.email} is a member"
            if wanted.account_id is None
            else f"{before.email} is not a member of {wanted.account_id}"
        )
        raise InvalidValue(
            f"{missing}. An e-mail address alone proves nothing, because an owner of another account can register it. "
            "Invite the person to a staff account, and repeat this with that account after they have joined"
        )
    if before.operator_role != wanted.role:
        connection.execute(delete(operator_roles).where(operator_roles.c.user_id == before.user_id))
        if wanted.role is not None:
            connection.execute(insert(operator_roles).values(user_id=before.user_id, role=wanted.role))
        end_sessions(connection, before.user_id, "", now)
        detail = {"role": {"was": before.operator_role, "is": wanted.role}}
        write_audit(transaction, wanted.audit, "set_operator_role", "", detail, now, subject=before.user_id)
    return read_person(connection, before.user_id)


@writes(AskCredit)
def ask_credit(transaction: Transaction, wanted: AskCredit, now: float) -> PendingCredit:
    connection = transaction.connection
    read_account(connection, wanted.account_id)
    if type(wanted.amount) is not int or not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{wanted.amount!r} nano-units: must be more than 0 and at most {MAX_AMOUNT}")
    if wanted.kind not in ("top_up", "grant"):
        raise InvalidValue(f"{wanted.kind!r}: a credit is a 'top_up' or a 'grant'")
    if wanted.memo:
        check_name(wanted.memo, "a memo", longest=400)
    detail = {"amount": wanted.amount, "kind": wanted.kind, "memo": wanted.memo}
    asked = {"account_id": wanted.account_id, "asked_by": wanted.audit.actor}
    pending_id = new_id("pending_")
    if wanted.once:
        check_name(wanted.once, "an idempotency key", longest=100)
        pending_id = f"pending_once_{wanted.once}"
        earlier = _find(connection, pending_id)
        if earlier is not None:
            if any(earlier._mapping[name] != value for name, value in (detail | asked).items()):
                raise Conflict("this form has been sent with other values: load the page again")
            return _pending(earlier)
    is_booked = wanted.amount + _given_alone(connection, wanted.audit.actor, now - DAY_S) <= wanted.alone
    decided = {"decided_by": wanted.audit.actor, "decided_at": now, "approved": True} if is_booked else {}
    connection.execute(insert(pending_credits).values(id=pending_id, asked_at=now, **detail, **asked, **decided))
    if is_booked:
        given = (wanted.account_id, wanted.amount, wanted.kind)
        credit = AddCredit(*given, idempotency_key=pending_id, memo=wanted.memo, audit=wanted.audit)
        add_credit(transaction, credit, now)
    else:
        write_audit(transaction, wanted.audit, "ask_credit", wanted.account_id, detail, now, subject=pending_id)
    row = _find(connection, pending_id)
    assert row is not None
    return _pending(row)


@reads(ListPendingCredits)
def list_pending_credits(connection: Connection, wanted: ListPendingCredits, _now: float) -> list[PendingCredit]:
    at = pending_credits.c.decided_at
    query = select(pending_credits).limit(check_page(wanted.limit))
    if wanted.decided:
        query = query.where(at.is_not(None)).order_by(at.desc(), pending_credits.c.id)
    else:
        query = query.where(at.is_(None)).order_by(pending_credits.c.asked_at)
    return [_pending(row) for row in connection.execute(query)]


@writes(DecideCredit)
def decide_credit(transaction: Transaction, wanted: DecideCredit, now: float) -> bool:
    connection, audit = transaction.connection, wanted.audit
    row = _find(connection, wanted.pending_id)
    if row is None or row.decided_at is not None:
        return False
    if wanted.approved and row.asked_by == audit.actor:
        raise InvalidValue("the person who requested the credit cannot approve it: ask another operator")
    decided = {"decided_by": audit.actor, "decided_at": now, "approved": wanted.approved}
    connection.execute(update(pending_credits).where(pending_credits.c.id == row.id).values(**decided))
    detail = {"amount": row.amount, "kind": row.kind, "asked_by": row.asked_by, "approved": wanted.approved}
    write_audit(transaction, audit, "decide_credit", row.account_id, detail, now, subject=row.id)
    if wanted.approved:
        memo = f"{row.memo} (asked for by {row.asked_by})" if row.memo else f"asked for by {row.asked_by}"
        credit = AddCredit(row.account_id, row.amount, row.kind, idempotency_key=row.id, memo=memo, audit=audit)
        add_credit(transaction, credit, now)
    return True


def _given_alone(connection: Connection, actor: str, since: float) -> int:
    """Sums the credits that an operator has given alone after `since`. Scans the whole table, which is small."""
    has = pending_credits.c
    alone = (equals(has.asked_by, actor), has.decided_by == has.asked_by, has.approved, has.decided_at > since)
    return int(connection.execute(select(func.coalesce(func.sum(has.amount), 0)).where(*alone)).scalar_one())


def _find(connection: Connection, pending_id: str) -> Row[Any] | None:
    return connection.execute(select(pending_credits).where(equals(pending_credits.c.id, pending_id))).one_or_none()


def _pending(row: Row[Any]) -> PendingCredit:
    asked = (row.id, row.account_id, row.amount, row.kind, row.memo, row.asked_by, row.asked_at)
    booked = row.approved is True and row.decided_by == row.asked_by
    return PendingCredit(*asked, booked, row.decided_by, row.decided_at, row.approved)
