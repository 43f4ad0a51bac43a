"""Changes accounts. Each change gives the account the next version, in the same transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from serve_app.accounting.audit_log import changed, value_of, write_audit
from serve_app.accounting.currency import check_currency
from serve_app.accounting.database import Transaction
from serve_app.accounting.funds import add_credit
from serve_app.accounting.registry import writes
from serve_app.accounting.schema import accounts
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_fields, check_limit, check_name
from serve_app.contracts.books import AccountSnapshot
from serve_app.contracts.commands import AddCredit, OpenAccount, SetActive, SetLimits
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.limits import ACCOUNT_LIMITS


@writes(OpenAccount)
def open_account(transaction: Transaction, wanted: OpenAccount, now: float) -> AccountSnapshot:
    account, is_new = _found_or_created(transaction, wanted, now)
    if is_new and wanted.limits:
        account = set_limits(transaction, SetLimits(account.account_id, wanted.limits, wanted.audit), now)
    if wanted.credit is not None:
        key = None if wanted.idempotency_key is None else f"{wanted.idempotency_key}:credit"
        terms = (wanted.credit, wanted.credit_kind, key, "Opening credit", wanted.credit_expires_at, wanted.audit)
        account = add_credit(transaction, AddCredit(account.account_id, *terms), now)
    return account


def _found_or_created(transaction: Transaction, wanted: OpenAccount, now: float) -> tuple[AccountSnapshot, bool]:
    connection = transaction.connection
    name, currency, key = wanted.name, wanted.currency, wanted.idempotency_key
    check_name(name)
    if not (len(currency) == 3 and currency.isascii() and currency.isalpha() and currency.isupper()):
        raise InvalidValue(f"{currency!r} is not a currency code: use three capital letters such as 'USD' (ISO 4217)")
    check_currency(connection, currency)
    if key is not None:
        check_name(key, "an idempotency key", longest=200)
        earlier = connection.execute(select(accounts).where(accounts.c.idempotency_key == key)).one_or_none()
        if earlier is not None:
            if (earlier.name, earlier.currency) != (name, currency):
                message = f"idempotency key {key!r} has created {earlier.id}, which is named {earlier.name!r}"
                raise Conflict(message)
            return read_account(connection, earlier.id), False
    account_id = new_id("acct_")
    given = {"id": account_id, "name": name, "currency": currency, "idempotency_key": key, "created_at": now}
    initial = {"active": True, "granted": 0, "topped_up": 0, "version": transaction.next_version()}
    connection.execute(insert(accounts).values(given | initial))
    write_audit(transaction, wanted.audit, "create_account", account_id, {"name": name, "currency": currency}, now)
    return read_account(connection, account_id), True


@writes(SetLimits)
def set_limits(transaction: Transaction, wanted: SetLimits, now: float) -> AccountSnapshot:
    check_fields(wanted.changes, ACCOUNT_LIMITS)
    for name, value in wanted.changes.items():
        check_limit(name, value)
    return _change(transaction, wanted, "set_limits", dict(wanted.changes), now)


@writes(SetActive)
def set_active(transaction: Transaction, wanted: SetActive, now: float) -> AccountSnapshot:
    return _change(transaction, wanted, "set_active", {"active": bool(wanted.active)}, now)


def _change(
    transaction: Transaction, wanted: SetLimits | SetActive, action: str, changes: dict[str, Any], now: float
) -> AccountSnapshot:
    connection, account_id = transaction.connection, wanted.account_id
    before = read_account(connection, account_id)
    if all(value_of(before, name) == value for name, value in changes.items()):
        return before  # nothing changes, so the version stays the same
    connection.execute(
        update(accounts).where(accounts.c.id == account_id).values(version=transaction.next_version(), **changes)
    )
    after = read_account(connection, account_id)
    write_audit(transaction, wanted.audit, action, account_id, changed(before, after, changes), now)
    return after
