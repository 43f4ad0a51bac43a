"""Refunds and chargebacks. No balance is ever negative: money already spent is a loss, recorded in the audit log.

A return that is reported again is recognised by its journal entry, or by its audit record if no money was left to take.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sqlalchemy import Connection, Row, select

from serve_app.accounting import journal
from serve_app.accounting.accounts import set_active
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import correct_balance
from serve_app.accounting.recharges import pause_recharge, stop_recharge
from serve_app.accounting.registry import writes
from serve_app.accounting.schema import audit_log, journal_entries, postings
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name
from serve_app.contracts.commands import CorrectBalance, SetActive
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.payments import ReturnPayment
from serve_app.contracts.recharges import StopRecharge

NOT_COVERED: Final = "return_not_covered"
UNMATCHED: Final = "return_unmatched"


@writes(ReturnPayment)
def return_payment(transaction: Transaction, wanted: ReturnPayment, now: float) -> int | None:
    connection, account_id, key = transaction.connection, wanted.account_id, wanted.idempotency_key
    if type(wanted.amount) is not int or not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{wanted.amount!r} nano-units: must be more than 0 and at most {MAX_AMOUNT}")
    for name in (key, wanted.reverses):
        check_name(name, "an idempotency key", longest=200)
    account = read_account(connection, account_id)
    if _is_booked(connection, account_id, key):
        return 0
    if not _is_booked(connection, account_id, wanted.reverses):
        if wanted.final:
            _record_unmatched(transaction, wanted, now)
        return None
    memo = f"{wanted.kind} {key}"
    if wanted.kind == "reinstatement":
        if back := _to_give_back(connection, wanted):
            correct_balance(transaction, CorrectBalance(account_id, back, memo, key, wanted.audit), now)
        return 0
    if taken := min(wanted.amount, account.topped_up):
        correct_balance(transaction, CorrectBalance(account_id, -taken, memo, key, wanted.audit), now)
    if wanted.kind == "chargeback":
        _suspend(transaction, wanted, now)
    else:
        pause_recharge(transaction, account_id, "A payment was refunded.", wanted.audit, now)
    if lost := wanted.amount - taken:
        detail = {"amount": wanted.amount, "lost": lost, "memo": memo}
        write_audit(transaction, wanted.audit, NOT_COVERED, account_id, detail, now, subject=key)
    return lost


def _record_unmatched(transaction: Transaction, wanted: ReturnPayment, now: float) -> None:
    """Records a return of a payment that has no entry, for example because an operator credited it by hand."""
    if _detail(transaction.connection, UNMATCHED, wanted.account_id, wanted.idempotency_key) is not None:
        return
    detail = {"amount": wanted.amount, "kind": wanted.kind, "reverses": wanted.reverses}
    write_audit(transaction, wanted.audit, UNMATCHED, wanted.account_id, detail, now, subject=wanted.idempotency_key)
    if wanted.kind == "chargeback":
        _suspend(transaction, wanted, now)


def _suspend(transaction: Transaction, wanted: ReturnPayment, now: float) -> None:
    set_active(transaction, SetActive(wanted.account_id, False, wanted.audit), now)
    stop_recharge(transaction, StopRecharge(wanted.account_id, wanted.audit), now)


def _to_give_back(connection: Connection, wanted: ReturnPayment) -> int:
    """Returns the amount to give back: `amount` minus what the chargeback could not take, at most what it took."""
    entry = _entry(connection, wanted.account_id, wanted.reverses)
    if entry is None:
        return 0
    mine = (postings.c.entry_id == entry.id, postings.c.ledger_account == journal.topped_up(wanted.account_id))
    taken = -int(connection.execute(select(postings.c.amount).where(*mine)).scalar_one())
    return min(taken, max(0, wanted.amount - (_lost(connection, wanted.account_id, wanted.reverses) or 0)))


def _is_booked(connection: Connection, account_id: str, key: str) -> bool:
    return _entry(connection, account_id, key) is not None or _lost(connection, account_id, key) is not None


def _entry(connection: Connection, account_id: str, key: str) -> Row[Any] | None:
    has = journal_entries.c
    query = select(has.id).where(has.account_id == account_id, has.idempotency_key == key)
    return connection.execute(query).one_or_none()


def _lost(connection: Connection, account_id: str, key: str) -> int | None:
    """Returns the amount that a return could not take. None: the return took the whole amount, or does not exist."""
    detail = _detail(connection, NOT_COVERED, account_id, key)
    return None if detail is None else int(detail["lost"])


def _detail(connection: Connection, action: str, account_id: str, key: str) -> dict[str, Any] | None:
    """Returns the detail of the audit record of a return, or None."""
    log = audit_log.c
    mine = (log.account_id == account_id, log.action == action, log.subject == key)
    detail = connection.execute(select(log.detail).where(*mine).limit(1)).scalar()
    return None if detail is None else dict(json.loads(detail))
