"""Changes of accounts and their funds. Each takes the next version, in the same transaction."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal

from sqlalchemy import insert, select, update

from serve_app.ledger import journal
from serve_app.ledger.audit_log import changed, write_audit
from serve_app.ledger.database import Transaction
from serve_app.ledger.errors import Conflict, InsufficientBalance, InvalidAmount, InvalidValue
from serve_app.ledger.grants import add_grant
from serve_app.ledger.journal import Entry, EntryKind
from serve_app.ledger.keys import new_id
from serve_app.ledger.messages import AccountSnapshot, Audit
from serve_app.ledger.money import MAX_AMOUNT, MAX_BALANCE, format_amount
from serve_app.ledger.schema import accounts, grants, journal_entries, postings
from serve_app.ledger.snapshots import get_account


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


#: Leaves a limit as it is, where None would give it the service's default.
UNSET: Final = Unset.UNSET

Limit = int | None | Literal[Unset.UNSET]
CreditKind = Literal["top_up", "grant"]
MAX_LIMIT = 10**12
_YEAR_10000 = 253402300800.0


def create_account(
    transaction: Transaction,
    name: str,
    *,
    currency: str,
    idempotency_key: str | None,
    audit: Audit | None,
    now: float,
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
            return get_account(transaction.connection, row.id)
    account_id = new_id("acct_")
    transaction.connection.execute(
        insert(accounts).values(
            id=account_id,
            name=name,
            active=True,
            currency=currency,
            granted=0,
            topped_up=0,
            version=transaction.next_version(),
            created_at=now,
            idempotency_key=idempotency_key,
        )
    )
    detail = {"name": name, "currency": currency}
    write_audit(transaction, audit, "create_account", subject=account_id, account_id=account_id, detail=detail, now=now)
    return get_account(transaction.connection, account_id)


def set_limits(
    transaction: Transaction, account_id: str, given: Mapping[str, Limit], *, audit: Audit | None, now: float
) -> AccountSnapshot:
    """See `Ledger.set_limits`."""
    wanted = {name: check_limit(name, value) for name, value in given.items() if value is not UNSET}
    return _change_account(transaction, account_id, wanted, "set_limits", audit, now)


def set_active(
    transaction: Transaction, account_id: str, active: bool, *, audit: Audit | None, now: float
) -> AccountSnapshot:
    """See `Ledger.set_active`."""
    return _change_account(transaction, account_id, {"active": bool(active)}, "set_active", audit, now)


def credit(
    transaction: Transaction,
    account_id: str,
    amount: int,
    *,
    kind: CreditKind,
    idempotency_key: str | None,
    memo: str,
    expires_at: float | None,
    audit: Audit | None,
    now: float,
) -> AccountSnapshot:
    """See `Ledger.credit`."""
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: credit more than 0 and at most {MAX_AMOUNT} at once")
    if kind not in ("top_up", "grant"):
        raise InvalidValue(f"{kind!r}: a credit is a 'top_up' or a 'grant'")
    granted = kind == "grant"
    if expires_at is not None:
        if not granted:
            raise InvalidValue("a top-up does not expire: credit a grant, or leave the expiry out")
        check_time(expires_at)
    moved = {
        journal.granted(account_id) if granted else journal.topped_up(account_id): amount,
        journal.FUNDS_GRANTED if granted else journal.FUNDS_RECEIVED: -amount,
    }
    earlier = _moved_before(transaction, account_id, moved, idempotency_key, expires_at)
    if earlier is not None:
        return earlier
    if expires_at is not None and expires_at <= now:  # only now: a repetition may come late
        raise InvalidValue(f"expires_at {expires_at!r} is past: give a later time in Unix seconds")
    entry_id = move(transaction, account_id, EntryKind(kind), moved, idempotency_key, memo, now)
    if granted:
        add_grant(transaction.connection, entry_id, account_id, amount, expires_at)
    detail = {"entry": entry_id, "kind": kind, "amount": amount, "memo": memo, "expires_at": expires_at}
    write_audit(transaction, audit, "credit", subject=account_id, account_id=account_id, detail=detail, now=now)
    return get_account(transaction.connection, account_id)


def correct(
    transaction: Transaction,
    account_id: str,
    amount: int,
    *,
    idempotency_key: str | None,
    memo: str,
    audit: Audit | None,
    now: float,
) -> AccountSnapshot:
    """See `Ledger.correct`."""
    if type(amount) is not int or not 0 < abs(amount) <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: correct by a whole number other than 0, at most {MAX_AMOUNT}")
    if not memo:
        raise InvalidValue("a correction without a memo: say what it corrects")
    moved = {journal.topped_up(account_id): amount, journal.CORRECTIONS: -amount}
    earlier = _moved_before(transaction, account_id, moved, idempotency_key, None)
    if earlier is not None:
        return earlier
    entry_id = move(transaction, account_id, EntryKind.CORRECTION, moved, idempotency_key, memo, now)
    detail = {"entry": entry_id, "amount": amount, "memo": memo}
    write_audit(transaction, audit, "correct", subject=account_id, account_id=account_id, detail=detail, now=now)
    return get_account(transaction.connection, account_id)


def check_name(name: str, what: str = "a name", *, longest: int = 100) -> None:
    """Raise InvalidValue unless this is 1 to `longest` printable characters."""
    if not isinstance(name, str) or not 1 <= len(name) <= longest or not name.isprintable() or not name.strip():
        raise InvalidValue(f"{name!r}: {what} has 1 to {longest} printable characters")
    if any(unicodedata.category(character) == "Cs" for character in name):
        raise InvalidValue(f"{name!r}: {what} has no lone surrogates")


def check_limit(name: str, value: Any) -> int | None:
    """Raise InvalidValue unless this is None or a whole number from 1."""
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_LIMIT):
        raise InvalidValue(f"{name} {value!r}: give a whole number from 1, or None for no limit of its own")
    return value


def check_time(at: Any) -> float:
    """Raise InvalidValue unless this is a time in Unix seconds."""
    if type(at) not in (int, float) or not 0 <= at < _YEAR_10000:  # NaN compares false
        raise InvalidValue(f"{at!r} is no time: give Unix seconds")
    return float(at)


def _change_account(
    transaction: Transaction, account_id: str, wanted: dict[str, Any], action: str, audit: Audit | None, now: float
) -> AccountSnapshot:
    before = get_account(transaction.connection, account_id)
    if all(getattr(before, name) == value for name, value in wanted.items()):
        return before  # no change, no version
    transaction.connection.execute(
        update(accounts).where(accounts.c.id == account_id).values(version=transaction.next_version(), **wanted)
    )
    after = get_account(transaction.connection, account_id)
    detail = changed(before, after, tuple(wanted))
    write_audit(transaction, audit, action, subject=account_id, account_id=account_id, detail=detail, now=now)
    return after


def _moved_before(
    transaction: Transaction,
    account_id: str,
    moved: dict[str, int],
    idempotency_key: str | None,
    expires_at: float | None,
) -> AccountSnapshot | None:
    """The account, if the idempotency key has moved this money before. Raises Conflict if it was something else."""
    connection = transaction.connection
    account = get_account(connection, account_id)
    if idempotency_key is None:
        return None
    check_name(idempotency_key, "an idempotency key", longest=200)
    mine = journal_entries.c.account_id == account_id
    same = journal_entries.c.idempotency_key == idempotency_key
    entry_id = connection.execute(select(journal_entries.c.id).where(mine, same)).scalar_one_or_none()
    if entry_id is None:
        return None
    lines = connection.execute(
        select(postings.c.ledger_account, postings.c.amount).where(postings.c.entry_id == entry_id)
    )
    expired_at = connection.execute(select(grants.c.expires_at).where(grants.c.entry_id == entry_id)).scalar()
    if ({line.ledger_account: line.amount for line in lines}, expired_at) != (moved, expires_at):
        raise Conflict(f"idempotency key {idempotency_key!r} has moved something else: entry {entry_id}")
    return account


def move(
    transaction: Transaction,
    account_id: str,
    kind: EntryKind,
    moved: dict[str, int],
    idempotency_key: str | None,
    memo: str,
    now: float,
) -> int:
    """Write an entry that moves money into or out of an account, and the balance with it; the entry's number."""
    connection = transaction.connection
    account = get_account(connection, account_id)
    if memo:
        check_name(memo, "a memo", longest=500)
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
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(granted=granted, topped_up=topped_up, version=transaction.next_version())
    )
    return entry.entry_id
