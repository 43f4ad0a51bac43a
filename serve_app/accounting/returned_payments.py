"""Refunds and chargebacks. No balance is ever negative: what was spent already is a loss that the audit log names."""

from __future__ import annotations

from serve_app.accounting.accounts import set_active
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import correct_balance, earlier_entry
from serve_app.accounting.snapshots import read_account
from serve_app.contracts.commands import CorrectBalance, SetActive
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.payments import ReturnPayment


def return_payment(transaction: Transaction, wanted: ReturnPayment, now: float) -> int:
    account_id, key = wanted.account_id, wanted.idempotency_key
    if type(wanted.amount) is not int or not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{wanted.amount!r} nano-units: return more than 0 and at most {MAX_AMOUNT} at once")
    account = read_account(transaction.connection, account_id)
    memo = f"{'chargeback' if wanted.is_chargeback else 'refund'} {key}"
    taken = min(wanted.amount, account.topped_up)
    correction = CorrectBalance(account_id, -taken, memo, key, wanted.audit)
    if earlier_entry(transaction.connection, correction) is not None:
        return 0
    if taken:
        correct_balance(transaction, correction, now)
    if wanted.is_chargeback:
        set_active(transaction, SetActive(account_id, False, wanted.audit), now)
    if lost := wanted.amount - taken:
        detail = {"amount": wanted.amount, "lost": lost, "memo": memo}
        write_audit(transaction, wanted.audit, "return_not_covered", account_id, detail, now)
    return lost
