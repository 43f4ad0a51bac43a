"""Accounts and keys as they are committed, and the feed of their changes."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Row, Select, select, tuple_

from serve_app.ledger import budgets, grants
from serve_app.ledger.errors import AccountNotFound, InvalidValue, KeyNotFound
from serve_app.ledger.messages import AccountSnapshot, Changes, KeySnapshot
from serve_app.ledger.schema import accounts, api_keys, head

MAX_PAGE = 1000

_KEYS = select(api_keys, accounts.c.version.label("account_version")).join(
    accounts, accounts.c.id == api_keys.c.account_id
)


def get_account(connection: Connection, account_id: str) -> AccountSnapshot:
    """See `Ledger.get_account`."""
    found = _accounts(connection, select(accounts).where(accounts.c.id == account_id))
    if not found:
        raise AccountNotFound(account_id)
    return found[0]


def list_accounts(connection: Connection, after: str | None, limit: int) -> list[AccountSnapshot]:
    """See `Ledger.list_accounts`."""
    query = select(accounts).order_by(accounts.c.created_at, accounts.c.id).limit(check_page(limit))
    if after is not None:
        last = get_account(connection, after)
        query = query.where(tuple_(accounts.c.created_at, accounts.c.id) > tuple_(last.created_at, last.account_id))
    return _accounts(connection, query)


def get_key(connection: Connection, key_id: str, *, now: float) -> KeySnapshot:
    """An API key by its id. Raises KeyNotFound."""
    found = _keys(connection, _KEYS.where(api_keys.c.id == key_id), now)
    if not found:
        raise KeyNotFound(key_id)
    return found[0]


def list_keys(connection: Connection, account_id: str, *, now: float) -> list[KeySnapshot]:
    """See `Ledger.list_keys`."""
    get_account(connection, account_id)
    query = _KEYS.where(api_keys.c.account_id == account_id).order_by(api_keys.c.created_at, api_keys.c.id)
    return _keys(connection, query, now)


def find_key(connection: Connection, digest: str, *, now: float) -> tuple[KeySnapshot, AccountSnapshot] | None:
    """See `Ledger.find_key`."""
    found = _keys(connection, _KEYS.where(api_keys.c.digest == digest), now)
    if not found:
        return None
    return found[0], get_account(connection, found[0].account_id)


def changes(connection: Connection, since: int, limit: int, *, now: float) -> Changes:
    """See `Ledger.changes`."""
    check_page(limit)
    version = connection.execute(select(head.c.version)).scalar_one()

    def page(query: Select[Any], table: Any) -> Select[Any]:
        return query.where(table.c.version > since).order_by(table.c.version).limit(limit + 1)

    changed: list[AccountSnapshot | KeySnapshot] = [*_accounts(connection, page(select(accounts), accounts))]
    changed += _keys(connection, page(_KEYS, api_keys), now)
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


def _accounts(connection: Connection, query: Select[Any]) -> list[AccountSnapshot]:
    rows = connection.execute(query).all()
    expiring = grants.expiring(connection, {row.id for row in rows if row.granted})
    return [_account_snapshot(row, expiring.get(row.id, ())) for row in rows]


def _keys(connection: Connection, query: Select[Any], now: float) -> list[KeySnapshot]:
    rows = connection.execute(query).all()
    periods = {row.id: budgets.period_at(row.budget_period, now) for row in rows if row.budget_period}
    spend = budgets.read_spend(connection, set(periods.items()))
    return [
        _key_snapshot(row, periods.get(row.id, ""), spend.get((row.id, periods.get(row.id, "")), 0)) for row in rows
    ]


def _account_snapshot(row: Row[Any], expiring: tuple[tuple[float, int], ...]) -> AccountSnapshot:
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
        weight=row.weight,
        expiring=expiring,
    )


def _key_snapshot(row: Row[Any], period: str, spent: int) -> KeySnapshot:
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
        models=None if row.models is None else tuple(json.loads(row.models)),
        rpm=row.rpm,
        tpm=row.tpm,
        concurrency=row.concurrency,
        budget=row.budget,
        budget_period=row.budget_period,
        spent=spent,
        spent_period=period,
        spent_version=row.account_version if row.budget_period else 0,
        expires_at=row.expires_at,
    )


def check_page(limit: int) -> int:
    """Raise InvalidValue unless a page may be this long."""
    if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
        raise InvalidValue(f"limit {limit!r}: ask for 1 to {MAX_PAGE} at once")
    return limit
