"""Money that operators add to or take from accounts. A movement is a journal entry and a new account version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from serve_app.accounting import journal
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.database import Transaction
from serve_app.accounting.grants import write_remaining
from serve_app.accounting.journal import Entry, EntryKind
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import accounts, grants, journal_entries, postings
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, check_time
from serve_app.contracts.books import AccountSnapshot, GrantSnapshot
from serve_app.contracts.commands import AddCredit, CorrectBalance, ExpireGrants, ListGrants, TakeBackGrant
from serve_app.contracts.errors import Conflict, GrantNotFound, InsufficientBalance, InvalidAmount, InvalidValue
from serve_app.contracts.money import MAX_AMOUNT, MAX_BALANCE, format_amount

#: Grace period: seconds between a grant's expiry and the removal of its remainder from the books. A request that began
#: before the expiry may still be paid from the grant: requests run for minutes, and their settlements may wait in a
#: gateway's spool while the database is unavailable.
GRACE_S = 3600.0
MAX_EXPIRED = 10_000

Movement = AddCredit | CorrectBalance | TakeBackGrant


@writes(AddCredit)
def add_credit(transaction: Transaction, wanted: AddCredit, now: float) -> AccountSnapshot:
    connection, account_id, amount = transaction.connection, wanted.account_id, wanted.amount
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: must be more than 0 and at most {MAX_AMOUNT}")
    if wanted.kind not in ("top_up", "grant"):
        raise InvalidValue(f"{wanted.kind!r}: a credit is a 'top_up' or a 'grant'")
    is_grant = wanted.kind == "grant"
    if wanted.expires_at is not None:
        if not is_grant:
            raise InvalidValue("a top-up does not expire: credit a grant, or leave the expiry out")
        check_time(wanted.expires_at)
    if is_grant:
        moved = {journal.granted(account_id): amount, journal.FUNDS_GRANTED: -amount}
    else:
        moved = {journal.topped_up(account_id): amount, journal.FUNDS_RECEIVED: -amount}
    if _moved_before(connection, wanted, moved, wanted.expires_at):
        return read_account(connection, account_id)
    if wanted.expires_at is not None and wanted.expires_at <= now:  # not checked for a repetition, which may come late
        raise InvalidValue(f"expires_at {wanted.expires_at!r} has passed: use a later time in Unix seconds")
    entry_id = _move(transaction, wanted, EntryKind(wanted.kind), moved, wanted.memo, now)
    if is_grant:
        grant = {"entry_id": entry_id, "account_id": account_id, "amount": amount, "remaining": amount}
        connection.execute(insert(grants).values(**grant, expires_at=wanted.expires_at))
    credit = {"kind": wanted.kind, "amount": amount, "memo": wanted.memo, "expires_at": wanted.expires_at}
    write_audit(transaction, wanted.audit, "credit", account_id, {"entry": entry_id} | credit, now)
    return read_account(connection, account_id)


@writes(CorrectBalance)
def correct_balance(transaction: Transaction, wanted: CorrectBalance, now: float) -> AccountSnapshot:
    connection, account_id, amount = transaction.connection, wanted.account_id, wanted.amount
    if type(amount) is not int or not 0 < abs(amount) <= MAX_AMOUNT:
        raise InvalidAmount(f"{amount!r} nano-units: correct by a whole number other than 0, at most {MAX_AMOUNT}")
    if not wanted.memo:
        raise InvalidValue("a correction without a memo: say what it corrects")
    moved = {journal.topped_up(account_id): amount, journal.CORRECTIONS: -amount}
    if _moved_before(connection, wanted, moved, None):
        return read_account(connection, account_id)
    entry_id = _move(transaction, wanted, EntryKind.CORRECTION, moved, wanted.memo, now)
    detail = {"entry": entry_id, "amount": amount, "memo": wanted.memo}
    write_audit(transaction, wanted.audit, "correct", account_id, detail, now)
    return read_account(connection, account_id)


@reads(ListGrants)
def list_grants(connection: Connection, wanted: ListGrants, _now: float) -> list[GrantSnapshot]:
    read_account(connection, wanted.account_id)
    entry = journal_entries.c
    query = (
        select(grants, entry.created_at, entry.memo)
        .select_from(grants.join(journal_entries))
        .where(grants.c.account_id == wanted.account_id)
        .order_by(grants.c.entry_id)
    )
    return [
        GrantSnapshot(row.entry_id, row.amount, row.remaining, row.created_at, row.expires_at, row.memo)
        for row in connection.execute(query)
    ]


@writes(TakeBackGrant)
def take_back_grant(transaction: Transaction, wanted: TakeBackGrant, now: float) -> AccountSnapshot:
    connection, account_id, grant_id = transaction.connection, wanted.account_id, wanted.grant_id
    if not wanted.memo:
        raise InvalidValue("taking back a grant needs a memo: say which mistake it corrects")
    account = read_account(connection, account_id)
    query = select(grants).where(grants.c.account_id == account_id, grants.c.entry_id == grant_id)
    grant = connection.execute(query).one_or_none()
    if grant is None:
        raise GrantNotFound(account_id, grant_id)
    # A repetition must have the same memo, which names the grant. The amount of a repetition can't be compared, because
    # the grant's remainder is 0 by then.
    memo = f"grant {grant_id}: {wanted.memo}"
    earlier = earlier_entry(connection, wanted)
    if earlier is not None:
        if (earlier.kind, earlier.memo) != (EntryKind.CORRECTION.value, memo):
            raise _conflict(wanted, earlier)
        return account
    if not grant.remaining:
        raise InsufficientBalance(f"nothing is left of grant {grant_id} of {account_id}")
    moved = {journal.granted(account_id): -grant.remaining, journal.CORRECTIONS: grant.remaining}
    entry_id = _move(transaction, wanted, EntryKind.CORRECTION, moved, memo, now)
    write_remaining(connection, {grant_id: 0})
    detail = {"entry": entry_id, "grant": grant_id, "amount": -grant.remaining, "memo": wanted.memo}
    write_audit(transaction, wanted.audit, "take_back", account_id, detail, now)
    return read_account(connection, account_id)


@writes(ExpireGrants)
def expire_grants(transaction: Transaction, wanted: ExpireGrants, now: float) -> int:
    limit = wanted.limit
    if type(limit) is not int or not 1 <= limit <= MAX_EXPIRED:
        raise InvalidValue(f"limit {limit!r}: must be from 1 to {MAX_EXPIRED}")
    connection = transaction.connection
    query = (
        select(grants.c.entry_id, grants.c.account_id, grants.c.remaining)
        .where(grants.c.remaining > 0, grants.c.expires_at <= now - GRACE_S)
        .order_by(grants.c.expires_at, grants.c.entry_id)
        .limit(limit)
    )
    expired = connection.execute(query).all()
    if not expired:
        return 0
    entries: list[Entry] = []
    totals: dict[str, int] = {}
    for row in expired:
        moved = {journal.granted(row.account_id): -row.remaining, journal.FUNDS_EXPIRED: row.remaining}
        memo = f"grant {row.entry_id}"
        entries.append(Entry(transaction.next_entry(), EntryKind.EXPIRY, row.account_id, now, moved, memo))
        totals[row.account_id] = totals.get(row.account_id, 0) + row.remaining
    journal.post(connection, entries)
    write_remaining(connection, {row.entry_id: 0 for row in expired})
    connection.execute(
        update(accounts)
        .where(accounts.c.id == bindparam("account"))
        .values(granted=accounts.c.granted - bindparam("rest"), version=bindparam("next")),
        [{"account": name, "rest": rest, "next": transaction.next_version()} for name, rest in totals.items()],
    )
    return len(expired)


def earlier_entry(connection: Connection, wanted: Movement) -> Row[Any] | None:
    """Returns the entry written with this account's idempotency key, or None."""
    key = wanted.idempotency_key
    if key is None:
        return None
    check_name(key, "an idempotency key", longest=200)
    entry = journal_entries.c
    query = select(journal_entries).where(entry.account_id == wanted.account_id, entry.idempotency_key == key)
    return connection.execute(query).one_or_none()


def _conflict(wanted: Movement, earlier: Row[Any]) -> Conflict:
    return Conflict(f"idempotency key {wanted.idempotency_key!r} was used for a different movement: entry {earlier.id}")


def _moved_before(connection: Connection, wanted: Movement, moved: Mapping[str, int], expires_at: float | None) -> bool:
    """Returns whether this movement was already booked under its idempotency key.

    Raises AccountNotFound, and Conflict if the key was used for a different movement.
    """
    read_account(connection, wanted.account_id)
    earlier = earlier_entry(connection, wanted)
    if earlier is None:
        return False
    query = select(postings.c.ledger_account, postings.c.amount).where(postings.c.entry_id == earlier.id)
    lines = {line.ledger_account: line.amount for line in connection.execute(query)}
    expired_at = connection.execute(select(grants.c.expires_at).where(grants.c.entry_id == earlier.id)).scalar()
    if (lines, expired_at) != (moved, expires_at):
        raise _conflict(wanted, earlier)
    return True


def _move(
    transaction: Transaction,
    wanted: Movement,
    kind: EntryKind,
    moved: dict[str, int],
    memo: str,
    now: float,
) -> int:
    """Posts an entry, changes the account's balance with it, and returns the entry's number."""
    connection, account_id = transaction.connection, wanted.account_id
    account = read_account(connection, account_id)
    if memo:
        check_name(memo, "a memo", longest=500)
    granted = account.granted + moved.get(journal.granted(account_id), 0)
    topped_up = account.topped_up + moved.get(journal.topped_up(account_id), 0)
    if granted + topped_up > MAX_BALANCE:
        raise InvalidAmount(f"the balance would exceed {format_amount(MAX_BALANCE)}: credit less")
    if topped_up < 0:
        raise InsufficientBalance(
            f"only {format_amount(account.topped_up)} of top-ups is left on {account_id}: correct by no more than that"
        )
    entry = Entry(transaction.next_entry(), kind, account_id, now, moved, memo, wanted.idempotency_key)
    journal.post(connection, [entry])
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(granted=granted, topped_up=topped_up, version=transaction.next_version())
    )
    return entry.entry_id
