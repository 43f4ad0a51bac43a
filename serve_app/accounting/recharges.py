"""Changes and reads an account's recharge settings and payment method. `recharge_attempts.py` has the payments."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Row, func, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import alerts, memberships, notices, recharge_attempts, recharges, users
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, equals
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.notices import MAX_A_DAY
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import (
    AskMethod,
    Attempt,
    Recharge,
    ResumeRecharge,
    SaveMethod,
    SetRecharge,
    ShowRecharge,
    StopRecharge,
)

LATEST: Final = 20
_AMOUNTS: Final = ("threshold", "amount", "monthly_cap")
_STORED: Final = (*_AMOUNTS, "state", "reason", "provider", "customer", "method", "setup_id", "next_at")


@writes(SetRecharge)
def set_recharge(transaction: Transaction, wanted: SetRecharge, now: float) -> Recharge:
    connection, account_id = transaction.connection, wanted.account_id
    read_account(connection, account_id)
    for name, least in (("threshold", 0), ("amount", 1), ("monthly_cap", 1)):
        value = getattr(wanted, name)
        if type(value) is not int or not least <= value <= MAX_AMOUNT:
            raise InvalidValue(
                f"{value!r} nano-units: the {name.replace('_', ' ')} must be from {least} to {MAX_AMOUNT}"
            )
    if wanted.amount > wanted.monthly_cap:
        raise InvalidValue("the monthly cap is less than one payment: raise the cap, or lower the amount")
    before, new = read_row(connection, account_id), {name: getattr(wanted, name) for name in _AMOUNTS}
    if before is None:
        start = {"account_id": account_id, "state": "off", "reason": "", "provider": "", "next_at": now}
        connection.execute(insert(recharges).values(start | new))
    else:
        _change(connection, account_id, **new)
    was = {name: before and before._mapping[name] for name in _AMOUNTS}
    if detail := {name: {"was": was[name], "is": new[name]} for name in _AMOUNTS if was[name] != new[name]}:
        write_audit(transaction, wanted.audit, "set_recharge", account_id, detail, now)
    return _read(connection, account_id, now)


@writes(AskMethod)
def ask_method(transaction: Transaction, wanted: AskMethod, now: float) -> Recharge:
    connection, account_id = transaction.connection, wanted.account_id
    row = _expect(connection, account_id)
    if row.setup_id is None:
        _change(connection, account_id, setup_id=(setup_id := new_id("setup_")))
        write_audit(transaction, wanted.audit, "ask_payment_method", account_id, {}, now, subject=setup_id)
    return _read(connection, account_id, now)


@writes(SaveMethod)
def save_method(transaction: Transaction, wanted: SaveMethod, now: float) -> str | None:
    connection, account_id, method = transaction.connection, wanted.account_id, wanted.method
    for what in (wanted.provider, wanted.customer, method):
        check_name(what, "an id of the provider", longest=200)
    row = read_row(connection, account_id)
    if row is None:
        return None  # the setup was not begun on this ledger, but by another service that uses the same provider
    if row.setup_id is None or row.setup_id != wanted.setup_id:
        # A repeated report has nothing to remove. Otherwise the setup has ended, and the caller removes the new method.
        return None if method == row.method else method
    ids = {"provider": wanted.provider, "customer": wanted.customer, "method": method}
    _change(connection, account_id, state="on", reason="", setup_id=None, **ids)
    write_audit(transaction, wanted.audit, "recharge_on", account_id, ids, now)
    return row.method if row.method != method and row.provider == wanted.provider else None


@writes(ResumeRecharge)
def resume_recharge(transaction: Transaction, wanted: ResumeRecharge, now: float) -> Recharge:
    connection, account_id = transaction.connection, wanted.account_id
    row = _expect(connection, account_id)
    if row.state == "off":
        raise Conflict("recharging is off: save a payment method first")
    if row.state == "paused":
        _change(connection, account_id, state="on", reason="")
        write_audit(transaction, wanted.audit, "resume_recharge", account_id, {"reason": row.reason}, now)
    return _read(connection, account_id, now)


@writes(StopRecharge)
def stop_recharge(transaction: Transaction, wanted: StopRecharge, now: float) -> str | None:
    connection, account_id = transaction.connection, wanted.account_id
    row = read_row(connection, account_id)
    if row is None or (row.state, row.setup_id) == ("off", None):
        return None
    # Remove the customer's id as well. A new setup then creates a new customer, even if the provider has deleted the
    # old one.
    _change(connection, account_id, state="off", reason="", customer=None, method=None, setup_id=None)
    write_audit(transaction, wanted.audit, "recharge_off", account_id, {"method": row.method}, now)
    return None if row.method is None else str(row.method)


def pause_recharge(transaction: Transaction, account_id: str, reason: str, audit: Audit | None, now: float) -> None:
    """Pauses recharging if it is on, and creates notices unless this UTC day already has `MAX_A_DAY` of them."""
    connection = transaction.connection
    row = read_row(connection, account_id)
    if row is None or row.state != "on":
        return
    _change(connection, account_id, state="paused", reason=reason)
    write_audit(transaction, audit, "pause_recharge", account_id, {"reason": reason}, now)
    made = (notices.c.account_id == account_id, notices.c.created_at >= period_at("day", now).begins)
    query = select(func.count()).select_from(notices).where(*made, notices.c.detail != "")
    if connection.execute(query).scalar_one() >= MAX_A_DAY:
        return
    # The previous release may read this row, too, and has no kind for this notice. The text that it shows for the kind
    # "balance" is true if the balance is below the threshold, and otherwise the closest one.
    shared = {
        "account_id": account_id,
        "kind": "balance",
        "threshold": row.threshold,
        "value": read_account(connection, account_id).available(now),
        "created_at": now,
        "attempts": 0,
        "next_at": now,
        "error": "",
        "detail": reason,
    }
    for target, secret in _targets(connection, account_id).items():
        own = {"id": new_id("notice_"), "target": target, "secret": secret}
        connection.execute(insert(notices).values(shared | own))


@reads(ShowRecharge)
def show_recharge(connection: Connection, wanted: ShowRecharge, now: float) -> tuple[Recharge | None, list[Attempt]]:
    account_id = read_account(connection, wanted.account_id).account_id
    has = recharge_attempts.c
    query = select(recharge_attempts).where(has.account_id == account_id)
    query = query.order_by(has.period.desc(), has.created_at.desc(), has.id).limit(LATEST)
    found = None if read_row(connection, account_id) is None else _read(connection, account_id, now)
    return found, [attempt_of(row) for row in connection.execute(query)]


def read_row(connection: Connection, account_id: str) -> Row[Any] | None:
    return connection.execute(select(recharges).where(equals(recharges.c.account_id, account_id))).one_or_none()


def sum_towards_cap(connection: Connection, account_id: str, period: str) -> int:
    """Returns the nano-units of a month's attempts that are not known to have failed."""
    has = recharge_attempts.c
    mine = (has.account_id == account_id, has.period == period, has.state != "failed")
    return int(connection.execute(select(func.coalesce(func.sum(has.amount), 0)).where(*mine)).scalar_one())


def attempt_of(row: Row[Any]) -> Attempt:
    return Attempt(
        row.id, row.account_id, row.amount, row.currency, row.provider, row.customer, row.method, row.created_at,
        row.period, row.state, row.error, row.tries, row.next_at,
    )  # fmt: skip


def _targets(connection: Connection, account_id: str) -> dict[str, str]:
    """Returns the recipients of the notice that recharging is paused, each with its webhook secret."""
    paying = (memberships.c.account_id == account_id, memberships.c.role.in_(("owner", "billing")))
    people = select(users.c.email).join(memberships).where(*paying, users.c.suspended.is_(False))
    by_email = dict.fromkeys(connection.scalars(people.order_by(users.c.email)), "")
    mine = (alerts.c.account_id == account_id, alerts.c.kind == "balance")
    return by_email | {row.target: row.secret for row in connection.execute(select(alerts).where(*mine))}


def _expect(connection: Connection, account_id: str) -> Row[Any]:
    read_account(connection, account_id)
    row = read_row(connection, account_id)
    if row is None:
        raise Conflict("recharging has no settings: give threshold, amount and cap first")
    return row


def _change(connection: Connection, account_id: str, **values: Any) -> None:
    connection.execute(update(recharges).where(recharges.c.account_id == account_id).values(**values))


def _read(connection: Connection, account_id: str, now: float) -> Recharge:
    row = _expect(connection, account_id)
    counted = sum_towards_cap(connection, account_id, period_at("month", now).name)
    return Recharge(account_id, **{name: row._mapping[name] for name in _STORED}, counted=counted)
