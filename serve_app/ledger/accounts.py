"""Changes of accounts, their funds and their API keys. Each takes the next version, in the same transaction."""

from __future__ import annotations

import unicodedata
from enum import Enum
from typing import Any, Final, Literal

from sqlalchemy import insert, select, update

from serve_app.ledger import journal
from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import (
    Conflict,
    InsufficientBalance,
    InvalidAmount,
    InvalidValue,
    KeyNotFound,
)
from serve_app.ledger.journal import Entry, EntryKind
from serve_app.ledger.keys import new_id
from serve_app.ledger.messages import AccountSnapshot, KeySnapshot
from serve_app.ledger.money import MAX_AMOUNT, MAX_BALANCE, format_amount
from serve_app.ledger.schema import accounts, api_keys, journal_entries, postings
from serve_app.ledger.snapshots import account_snapshot, get_account, key_snapshot


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


#: Leaves a limit as it is, where None would give it the service's default.
UNSET: Final = Unset.UNSET

Limit = int | None | Literal[Unset.UNSET]
CreditKind = Literal["top_up", "grant"]
MAX_LIMIT = 10**12


def create_account(
    transaction: Transaction, name: str, *, currency: str, idempotency_key: str | None, now: float
) -> AccountSnapshot:
    """See `Ledger.create_account`."""
    check_name(name)
    if not (len(currency) == 3 and currency.isascii() and currency.isalpha() and currency.isupper()):
        raise InvalidValue(f"{currency!r} is no currency: give three capital letters such as 'USD' (ISO 4217)")
    if idempotency_key is not None:
        check_name(idempotency_key, "an idempotency key", longest=200)
        row = transaction.connection.execute(
            select(accounts).where(accounts.c.idempotency_key == idempotency_key)
        ).one_or_none()
        if row is not None:
            if (row.name, row.currency) != (name, currency):
                raise Conflict(f"idempotency key {idempotency_key!r} has created {row.id}, which is named {row.name!r}")
            return account_snapshot(row)
    account = AccountSnapshot(
        account_id=new_id("acct_"),
        name=name,
        active=True,
        currency=currency,
        granted=0,
        topped_up=0,
        version=transaction.next_version(),
        created_at=now,
    )
    transaction.connection.execute(
        insert(accounts).values(
            id=account.account_id,
            name=name,
            active=True,
            currency=currency,
            granted=0,
            topped_up=0,
            version=account.version,
            created_at=now,
            idempotency_key=idempotency_key,
        )
    )
    return account


def set_limits(
    transaction: Transaction, account_id: str, *, rpm: Limit, tpm: Limit, concurrency: Limit
) -> AccountSnapshot:
    """See `Ledger.set_limits`."""
    given = {"rpm": rpm, "tpm": tpm, "concurrency": concurrency}
    wanted = {name: value for name, value in given.items() if value is not UNSET}
    for name, value in wanted.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_LIMIT):
            raise InvalidValue(f"{name} {value!r}: give a whole number from 1, or None for the service's default")
    return _change_account(transaction, account_id, wanted)


def set_active(transaction: Transaction, account_id: str, active: bool) -> AccountSnapshot:
    """See `Ledger.set_active`."""
    return _change_account(transaction, account_id, {"active": bool(active)})


def credit(
    transaction: Transaction,
    account_id: str,
    amount: int,
    *,
    kind: CreditKind,
    idempotency_key: str | None,
    memo: str,
    now: float,
) -> AccountSnapshot:
    """See `Ledger.credit`."""
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: credit more than 0 and at most {MAX_AMOUNT} at once")
    if kind not in ("top_up", "grant"):
        raise InvalidValue(f"{kind!r}: a credit is a 'top_up' or a 'grant'")
    granted = kind == "grant"
    moved = {
        journal.granted(account_id) if granted else journal.topped_up(account_id): amount,
        journal.FUNDS_GRANTED if granted else journal.FUNDS_RECEIVED: -amount,
    }
    return _move(transaction, account_id, EntryKind(kind), moved, idempotency_key, memo, now)


def correct(
    transaction: Transaction, account_id: str, amount: int, *, idempotency_key: str | None, memo: str, now: float
) -> AccountSnapshot:
    """See `Ledger.correct`."""
    if type(amount) is not int or not 0 < abs(amount) <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: correct by a whole number other than 0, at most {MAX_AMOUNT}")
    if not memo:
        raise InvalidValue("a correction without a memo: say what it corrects")
    moved = {journal.topped_up(account_id): amount, journal.CORRECTIONS: -amount}
    return _move(transaction, account_id, EntryKind.CORRECTION, moved, idempotency_key, memo, now)


def create_key(
    transaction: Transaction, account_id: str, name: str, digest: str, hint: str, *, now: float
) -> KeySnapshot:
    """See `Ledger.create_key`."""
    check_name(name)
    check_name(hint, "a hint", longest=40)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidValue("a digest is 64 hex digits: pass what keys.digest(key, secret) gives, never the key itself")
    get_account(transaction.connection, account_id)
    row = transaction.connection.execute(select(api_keys).where(api_keys.c.digest == digest)).one_or_none()
    if row is not None:
        if (row.account_id, row.name) != (account_id, name):
            raise Conflict("this API key exists already: make a new one")
        return key_snapshot(row)
    key = KeySnapshot(
        key_id=new_id("key_"),
        account_id=account_id,
        name=name,
        digest=digest,
        hint=hint,
        active=True,
        version=transaction.next_version(),
        created_at=now,
    )
    transaction.connection.execute(
        insert(api_keys).values(
            id=key.key_id,
            account_id=account_id,
            name=name,
            digest=digest,
            hint=hint,
            active=True,
            version=key.version,
            created_at=now,
        )
    )
    return key


def revoke_key(transaction: Transaction, key_id: str, *, now: float) -> KeySnapshot:
    """See `Ledger.revoke_key`."""
    mine = api_keys.c.id == key_id
    row = transaction.connection.execute(select(api_keys).where(mine)).one_or_none()
    if row is None:
        raise KeyNotFound(key_id)
    if not row.active:
        return key_snapshot(row)
    change = update(api_keys).where(mine).values(active=False, revoked_at=now, version=transaction.next_version())
    return key_snapshot(transaction.connection.execute(change.returning(*api_keys.c)).one())


def check_name(name: str, what: str = "a name", *, longest: int = 100) -> None:
    """Raise InvalidValue unless this is 1 to `longest` printable characters."""
    if not isinstance(name, str) or not 1 <= len(name) <= longest or not name.isprintable() or not name.strip():
        raise InvalidValue(f"{name!r}: {what} has 1 to {longest} printable characters")
    if any(unicodedata.category(character) == "Cs" for character in name):
        raise InvalidValue(f"{name!r}: {what} has no lone surrogates")


def _change_account(transaction: Transaction, account_id: str, wanted: dict[str, Any]) -> AccountSnapshot:
    account = get_account(transaction.connection, account_id)
    if all(getattr(account, name) == value for name, value in wanted.items()):
        return account  # no change, no version
    change = update(accounts).where(accounts.c.id == account_id).values(version=transaction.next_version(), **wanted)
    return account_snapshot(transaction.connection.execute(change.returning(*accounts.c)).one())


def _move(
    transaction: Transaction,
    account_id: str,
    kind: EntryKind,
    moved: dict[str, int],
    idempotency_key: str | None,
    memo: str,
    now: float,
) -> AccountSnapshot:
    """Write an entry that moves money into or out of an account, and the balance with it."""
    connection = transaction.connection
    account = get_account(connection, account_id)
    if memo:
        check_name(memo, "a memo", longest=500)
    if idempotency_key is not None:
        check_name(idempotency_key, "an idempotency key", longest=200)
        mine = journal_entries.c.account_id == account_id
        same = journal_entries.c.idempotency_key == idempotency_key
        entry_id = connection.execute(select(journal_entries.c.id).where(mine, same)).scalar_one_or_none()
        if entry_id is not None:
            lines = connection.execute(
                select(postings.c.ledger_account, postings.c.amount).where(postings.c.entry_id == entry_id)
            )
            if {line.ledger_account: line.amount for line in lines} != moved:
                raise Conflict(f"idempotency key {idempotency_key!r} has moved another amount: entry {entry_id}")
            return account
    granted = account.granted + moved.get(journal.granted(account_id), 0)
    topped_up = account.topped_up + moved.get(journal.topped_up(account_id), 0)
    if granted + topped_up > MAX_BALANCE:
        raise InvalidAmount(f"the balance would pass {format_amount(MAX_BALANCE)}: credit less")
    if topped_up < 0:
        raise InsufficientBalance(
            f"only {format_amount(account.topped_up)} of top-ups is left on {account_id}: correct by no more than that"
        )
    entry = Entry(transaction.next_entry(), kind, account_id, now, moved, memo, idempotency_key)
    journal.write(connection, [entry])
    change = (
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(granted=granted, topped_up=topped_up, version=transaction.next_version())
    )
    return account_snapshot(connection.execute(change.returning(*accounts.c)).one())
