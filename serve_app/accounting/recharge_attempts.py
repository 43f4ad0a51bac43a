"""Payments that recharge accounts: when an attempt begins, which process handles it, and its outcome.

Watching accounts only reads the ledger. A process that begins an attempt first takes the ledger's writer lock, and then
reads balance, cap and settings again. With any number of watching processes, an account therefore has at most one open
attempt, and a month's payments stay within its cap. Attempts that are not known to have failed count towards the cap.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Row, exists, insert, literal_column, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import recharge_attempts, recharges
from serve_app.accounting.database import Transaction
from serve_app.accounting.recharges import attempt_of, pause_recharge, read_row, sum_towards_cap
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import accounts
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import equals
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.payments import Paid
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import (
    AGAIN_S,
    BETWEEN_S,
    ORDER_S,
    Attempt,
    BeginRecharge,
    Claim,
    ClaimAttempt,
    EndAttempt,
    ListDueAttempts,
    RecordOutcome,
    WatchRecharges,
)

#: In the past tense, because the text remains the reason for the pause after the outcome is known.
UNKNOWN: Final = "The payment's outcome was unknown for a day. If it was paid, the credit is added."
ENDED: Final = "An operator saw that it was not paid."
BATCH: Final = 200
MAX_DUE: Final = 100
# Literals, because neither database uses a partial index if the value is a bound parameter.
_ON: Final = recharges.c.state == literal_column("'on'")
_OPEN: Final = recharge_attempts.c.state == literal_column("'open'")


@reads(WatchRecharges)
def watch_recharges(connection: Connection, wanted: WatchRecharges, now: float) -> tuple[list[str], str | None]:
    has = recharges.c
    is_open = exists().where(recharge_attempts.c.account_id == has.account_id, _OPEN)
    may_be_low = (accounts.c.active, accounts.c.topped_up <= has.threshold)  # `_is_due` then also counts grants
    query = (
        select(recharges)
        .join(accounts)
        .where(_ON, has.account_id > wanted.after, has.provider == wanted.provider, has.next_at <= now)
        .where(*may_be_low, ~is_open)
        .order_by(has.account_id)
        .limit(BATCH)
    )
    found = connection.execute(query).all()
    return [row.account_id for row in found if _is_due(connection, row, now)], (
        found[-1].account_id if len(found) == BATCH else None
    )


@writes(BeginRecharge)
def begin_recharge(transaction: Transaction, wanted: BeginRecharge, now: float) -> Attempt | None:
    connection, account_id = transaction.connection, wanted.account_id
    row = read_row(connection, account_id)
    if row is None or row.state != "on" or row.provider != wanted.provider or row.next_at > now:
        return None
    is_open = select(recharge_attempts.c.id).where(recharge_attempts.c.account_id == account_id, _OPEN)
    if connection.execute(is_open).first() is not None or not _is_due(connection, row, now):
        return None
    values = {
        "id": (attempt_id := new_id("recharge_")),
        "account_id": account_id,
        "amount": row.amount,
        "currency": read_account(connection, account_id).currency,
        "provider": row.provider,
        "customer": row.customer,
        "method": row.method,
        "created_at": now,
        "period": period_at("month", now).name,
        "state": "open",
        "error": "",
        "tries": 1,
        "next_at": now + AGAIN_S[0],
    }
    connection.execute(insert(recharge_attempts).values(values))
    write_audit(
        transaction, wanted.audit, "begin_recharge", account_id, {"amount": row.amount}, now, subject=attempt_id
    )
    return _read(connection, attempt_id)


@reads(ListDueAttempts)
def list_due_attempts(connection: Connection, wanted: ListDueAttempts, now: float) -> list[Attempt]:
    has = recharge_attempts.c
    query = select(recharge_attempts).where(_OPEN, has.next_at <= now, has.provider == wanted.provider)
    return [attempt_of(row) for row in connection.execute(query.order_by(has.next_at, has.id).limit(MAX_DUE))]


@writes(ClaimAttempt)
def claim_attempt(transaction: Transaction, wanted: ClaimAttempt, now: float) -> Claim | None:
    connection = transaction.connection
    row = _find(connection, wanted.attempt_id)
    if row is None or row.state != "open" or row.tries != wanted.tries:
        return None
    next_at = now + AGAIN_S[min(row.tries, len(AGAIN_S) - 1)]
    mine = recharge_attempts.c.id == row.id
    connection.execute(update(recharge_attempts).where(mine).values(tries=row.tries + 1, next_at=next_at))
    return Claim(_read(connection, row.id), _refusal(connection, row, now))


@writes(RecordOutcome)
def record_outcome(transaction: Transaction, wanted: RecordOutcome, now: float) -> None:
    connection, state, error = transaction.connection, wanted.state, wanted.error[:300]
    if state not in ("open", "succeeded", "failed"):
        raise InvalidValue(f"state {state!r}: an attempt is 'open', 'succeeded' or 'failed'")
    row = _find(connection, wanted.attempt_id)
    if row is None and wanted.paid is not None and state == "succeeded":
        _insert_paid(connection, wanted.paid, wanted.provider)
        row = _find(connection, wanted.attempt_id)
    elif row is None or row.state == "succeeded" or (row.state == "failed" and state != "succeeded"):
        return
    assert row is not None
    changes = {"state": state, "error": error, "next_at": row.next_at if state == "open" else None}
    connection.execute(update(recharge_attempts).where(recharge_attempts.c.id == row.id).values(changes))
    account_id = row.account_id
    if state == "open":
        # The attempt stays open and blocks new ones, because its payment may exist. Pausing sends a notice.
        if now >= row.created_at + ORDER_S and read_account(connection, account_id).active:
            pause_recharge(transaction, account_id, UNKNOWN, wanted.audit, now)
        return
    detail = {"state": state, "amount": row.amount, "error": error}
    write_audit(transaction, wanted.audit, "end_recharge", account_id, detail, now, subject=row.id)
    settings = read_row(connection, account_id)
    if settings is None:
        return  # this ledger was restored from a backup that is older than the account's settings
    later = max(settings.next_at, now + BETWEEN_S)
    connection.execute(update(recharges).where(recharges.c.account_id == account_id).values(next_at=later))
    # No pause if the account is suspended (it is not recharged anyway) or if the failed method was replaced.
    if state == "failed" and settings.method == row.method and read_account(connection, account_id).active:
        pause_recharge(transaction, account_id, error, wanted.audit, now)


@writes(EndAttempt)
def end_attempt(transaction: Transaction, wanted: EndAttempt, now: float) -> None:
    row = _find(transaction.connection, wanted.attempt_id)
    if row is None or row.account_id != wanted.account_id:
        raise InvalidValue("the account has no such attempt")
    if row.state != "open":
        raise Conflict("the attempt has already ended")
    if now < row.created_at + ORDER_S:
        raise Conflict("the attempt may still be paid: it can be ended 23 hours after it began")
    record_outcome(transaction, RecordOutcome(row.id, "failed", ENDED, wanted.audit), now)


def _insert_paid(connection: Connection, paid: Paid, provider: str) -> None:
    """Records an attempt that is missing in this ledger, from the details of its payment."""
    values = {
        "id": paid.attempt_id,
        "account_id": paid.account_id,
        "amount": paid.amount,
        "currency": paid.currency,
        "provider": provider,
        "customer": "",
        "method": "",
        "created_at": paid.created_at,
        "period": period_at("month", paid.created_at).name,
        "state": "succeeded",
        "error": "",
        "tries": 1,
        "next_at": None,
    }
    connection.execute(insert(recharge_attempts).values(values))


def _is_due(connection: Connection, row: Row[Any], now: float) -> bool:
    """Returns whether to recharge an account that has recharging on and no open attempt."""
    account = read_account(connection, row.account_id)
    if not account.active or account.available(now) > row.threshold:
        return False
    counted = sum_towards_cap(connection, account.account_id, period_at("month", now).name)
    return bool(counted + row.amount <= row.monthly_cap)


def _refusal(connection: Connection, row: Row[Any], now: float) -> str:
    """Returns the reason why a payment that does not exist yet must not be ordered; empty if it may be ordered."""
    if now >= row.created_at + ORDER_S:  # checked first: recharging is paused by then, but that is not the reason
        return "The payment could not be started within a day."
    settings = read_row(connection, row.account_id)
    if settings is None or settings.state != "on":
        return "Recharging was turned off or paused."
    if settings.method != row.method:
        return "The payment method was replaced."
    if not read_account(connection, row.account_id).active:
        return "The account was suspended."
    return ""


def _find(connection: Connection, attempt_id: str) -> Row[Any] | None:
    query = select(recharge_attempts).where(equals(recharge_attempts.c.id, attempt_id))
    return connection.execute(query).one_or_none()


def _read(connection: Connection, attempt_id: str) -> Attempt:
    return attempt_of(connection.execute(select(recharge_attempts).where(recharge_attempts.c.id == attempt_id)).one())
