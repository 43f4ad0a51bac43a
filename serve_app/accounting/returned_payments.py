"""Refunds and chargebacks. No balance is ever negative: what was spent already is a loss, recorded on the audit log.

A return is known again by its journal entry. Where nothing was left to take there is none: then by its audit record.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, select

from serve_app.accounting.accounts import set_active
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import correct_balance, earlier_entry
from serve_app.accounting.recharges import pause_recharge, stop_recharge
from serve_app.accounting.schema import audit_log
from serve_app.accounting.snapshots import read_account
from serve_app.contracts.commands import CorrectBalance, SetActive
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.payments import ReturnPayment
from serve_app.contracts.recharges import StopRecharge

NOT_COVERED: Final = "return_not_covered"


def return_payment(transaction: Transaction, wanted: ReturnPayment, now: float) -> int:
    account_id, key = wanted.account_id, wanted.idempotency_key
    if type(wanted.amount) is not int or not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{wanted.amount!r} nano-units: return more than 0 and at most {MAX_AMOUNT} at once")
    account = read_account(transaction.connection, account_id)
    memo = f"{'chargeback' if wanted.is_chargeback else 'refund'} {key}"
    taken = min(wanted.amount, account.topped_up)
    correction = CorrectBalance(account_id, -taken, memo, key, wanted.audit)
    if earlier_entry(transaction.connection, correction) is not None or _is_recorded(transaction.connection, wanted):
        return 0
    if taken:
        correct_balance(transaction, correction, now)
    if wanted.is_chargeback:
        set_active(transaction, SetActive(account_id, False, wanted.audit), now)
        stop_recharge(transaction, StopRecharge(account_id, wanted.audit), now)
    else:
        pause_recharge(transaction, account_id, "A payment was refunded.", wanted.audit, now)
    if lost := wanted.amount - taken:
        detail = {"amount": wanted.amount, "lost": lost, "memo": memo}
        write_audit(transaction, wanted.audit, NOT_COVERED, account_id, detail, now, subject=key)
    return lost


def _is_recorded(connection: Connection, wanted: ReturnPayment) -> bool:
    log = audit_log.c
    mine = (log.account_id == wanted.account_id, log.action == NOT_COVERED, log.subject == wanted.idempotency_key)
    return connection.execute(select(log.id).where(*mine).limit(1)).first() is not None
