"""Accounts and keys as they are committed, and the feed of their changes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select, tuple_

from serve_app.ledger.errors import AccountNotFound, InvalidValue
from serve_app.ledger.messages import AccountSnapshot, Changes, KeySnapshot
from serve_app.ledger.schema import accounts, api_keys, head

MAX_PAGE = 1000


def get_account(connection: Connection, account_id: str) -> AccountSnapshot:
    """See `Ledger.get_account`."""
    row = connection.execute(select(accounts).where(accounts.c.id == account_id)).one_or_none()
    if row is None:
        raise AccountNotFound(account_id)
    return account_snapshot(row)


def list_accounts(connection: Connection, after: str | None, limit: int) -> list[AccountSnapshot]:
    """See `Ledger.list_accounts`."""
    query = select(accounts).order_by(accounts.c.created_at, accounts.c.id).limit(check_page(limit))
    if after is not None:
        last = get_account(connection, after)
        query = query.where(tuple_(accounts.c.created_at, accounts.c.id) > tuple_(last.created_at, last.account_id))
    return [account_snapshot(row) for row in connection.execute(query)]


def list_keys(connection: Connection, account_id: str) -> list[KeySnapshot]:
    """See `Ledger.list_keys`."""
    get_account(connection, account_id)
    query = select(api_keys).where(api_keys.c.account_id == account_id).order_by(api_keys.c.created_at, api_keys.c.id)
    return [key_snapshot(row) for row in connection.execute(query)]


def find_key(connection: Connection, digest: str) -> tuple[KeySnapshot, AccountSnapshot] | None:
    """See `Ledger.find_key`."""
    key = connection.execute(select(api_keys).where(api_keys.c.digest == digest)).one_or_none()
    if key is None:
        return None
    return key_snapshot(key), get_account(connection, key.account_id)


def changes(connection: Connection, since: int, limit: int) -> Changes:
    """See `Ledger.changes`."""
    check_page(limit)
    version = connection.execute(select(head.c.version)).scalar_one()
    changed: list[AccountSnapshot | KeySnapshot] = []
    for table, snapshot in ((accounts, account_snapshot), (api_keys, key_snapshot)):
        query = select(table).where(table.c.version > since).order_by(table.c.version).limit(limit + 1)
        changed += [snapshot(row) for row in connection.execute(query)]
    changed.sort(key=lambda one: one.version)
    more = len(changed) > limit
    if more:
        changed = changed[:limit]
        version = changed[-1].version
    return Changes(
        version=version,
        accounts=tuple(one for one in changed if isinstance(one, AccountSnapshot)),
        keys=tuple(one for one in changed if isinstance(one, KeySnapshot)),
        more=more,
    )


def account_snapshot(row: Row[Any]) -> AccountSnapshot:
    """A row of `accounts` as a message."""
    return AccountSnapshot(
        account_id=row.id,
        name=row.name,
        active=row.active,
        currency=row.currency,
        granted=row.granted,
        topped_up=row.topped_up,
        version=row.version,
        created_at=row.created_at,
        rpm=row.rpm,
        tpm=row.tpm,
        concurrency=row.concurrency,
    )


def key_snapshot(row: Row[Any]) -> KeySnapshot:
    """A row of `api_keys` as a message."""
    return KeySnapshot(
        key_id=row.id,
        account_id=row.account_id,
        name=row.name,
        digest=row.digest,
        hint=row.hint,
        active=row.active,
        version=row.version,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )


def check_page(limit: int) -> int:
    """Raise InvalidValue unless a page may be this long."""
    if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
        raise InvalidValue(f"limit {limit!r}: ask for 1 to {MAX_PAGE} at once")
    return limit
