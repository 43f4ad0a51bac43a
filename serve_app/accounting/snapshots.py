"""Committed accounts and keys, and the feed of their changes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, exists, func, or_, select, tuple_

from serve_app.accounting import budgets, grants
from serve_app.accounting.registry import LONG_S, reads
from serve_app.accounting.schema import accounts, api_keys, head, usage_daily
from serve_app.accounting.validation import check_day, check_name, check_page, equals
from serve_app.contracts.books import AccountSnapshot, Changes, KeySnapshot
from serve_app.contracts.commands import FindKeys, GetAccount, ListAccounts, ListKeys, ReadChanges
from serve_app.contracts.errors import AccountNotFound, InvalidValue, KeyNotFound
from serve_app.contracts.limits import ACCOUNT_LIMITS, KEY_LIMITS
from serve_app.contracts.operators import ORDERS, AccountsPage, FoundAccount, SearchAccounts
from serve_app.contracts.periods import period_at

_KEYS = select(api_keys, accounts.c.version.label("account_version")).join(
    accounts, accounts.c.id == api_keys.c.account_id
)


def read_account(connection: Connection, account_id: str) -> AccountSnapshot:
    """Returns an account. Raises AccountNotFound."""
    snapshots = _accounts(connection, select(accounts).where(equals(accounts.c.id, account_id)))
    if not snapshots:
        raise AccountNotFound(account_id)
    return snapshots[0]


def read_key(connection: Connection, key_id: str, now: float) -> KeySnapshot:
    """Returns a key. Raises KeyNotFound."""
    snapshots = _keys(connection, _KEYS.where(equals(api_keys.c.id, key_id)), now)
    if not snapshots:
        raise KeyNotFound(key_id)
    return snapshots[0]


@reads(GetAccount)
def get_account(connection: Connection, wanted: GetAccount, _now: float) -> AccountSnapshot:
    return read_account(connection, wanted.account_id)


@reads(ListAccounts)
def list_accounts(connection: Connection, wanted: ListAccounts, _now: float) -> list[AccountSnapshot]:
    query = select(accounts).order_by(accounts.c.created_at, accounts.c.id).limit(check_page(wanted.limit))
    if wanted.after is not None:
        last = read_account(connection, wanted.after)
        query = query.where(tuple_(accounts.c.created_at, accounts.c.id) > tuple_(last.created_at, last.account_id))
    return _accounts(connection, query)


@reads(SearchAccounts, timeout_s=LONG_S)
def search_accounts(connection: Connection, wanted: SearchAccounts, now: float) -> AccountsPage:
    if wanted.order not in ORDERS:
        raise InvalidValue(f"the order of accounts must be one of: {', '.join(ORDERS)}")
    text, balance = wanted.text.strip().lower(), accounts.c.granted + accounts.c.topped_up
    daily = usage_daily.c
    today = select(daily.account_id, func.sum(daily.charged).label("charged")).group_by(daily.account_id)
    spent = today.where(daily.day == period_at("day", now).name).subquery()
    is_by_spend = wanted.order == "highest spend today"
    by = {"newest": accounts.c.created_at, "name": func.lower(accounts.c.name)}.get(wanted.order, balance)
    query = select(accounts)
    if is_by_spend:
        by = func.coalesce(spent.c.charged, 0)
        query = query.outerjoin(spent, spent.c.account_id == accounts.c.id)
    is_falling = is_by_spend or wanted.order in ("newest", "highest balance")
    then = [accounts.c.created_at.desc()] if is_by_spend else []
    query = query.order_by(by.desc() if is_falling else by, *then, accounts.c.id)
    query = query.limit(check_page(wanted.limit) + 1)
    if text:
        check_name(text, "a search")
        named = func.lower(accounts.c.name).contains(text, autoescape=True)
        query = query.where(or_(named, accounts.c.id.startswith(text, autoescape=True)))
    if wanted.active is not None:
        query = query.where(accounts.c.active == wanted.active)
    if wanted.below is not None:
        query = query.where(balance < wanted.below)
    since = daily.day >= check_day(wanted.day_from or "1970-01-01")
    if wanted.spending is not None:
        charged = exists().where(daily.account_id == accounts.c.id, since, daily.charged > 0)
        query = query.where(charged if wanted.spending else ~charged)
    if wanted.after is not None:
        last = read_account(connection, wanted.after)
        is_next: ColumnElement[bool] = accounts.c.id > last.account_id
        bound: Any = select(by).where(accounts.c.id == last.account_id).scalar_subquery()
        if is_by_spend:
            of_last = select(func.coalesce(func.sum(spent.c.charged), 0)).where(spent.c.account_id == last.account_id)
            bound, created = connection.execute(of_last).scalar_one(), accounts.c.created_at
            is_next = or_(created < last.created_at, and_(created == last.created_at, is_next))
        query = query.where(or_(by < bound if is_falling else by > bound, and_(by == bound, is_next)))
    found = _accounts(connection, query)
    page = found[: wanted.limit]
    ids = [one.account_id for one in page]
    sums = select(
        daily.account_id, func.sum(daily.charged).label("charged"), func.sum(daily.requests).label("requests")
    )
    sums = sums.where(daily.account_id.in_(ids), since).group_by(daily.account_id)
    usage = {row.account_id: (int(row.charged), int(row.requests)) for row in connection.execute(sums)}
    rows = tuple(FoundAccount(one, *usage.get(one.account_id, (0, 0))) for one in page)
    return AccountsPage(rows, page[-1].account_id if len(found) > wanted.limit else None)


@reads(ListKeys)
def list_keys(connection: Connection, wanted: ListKeys, now: float) -> list[KeySnapshot]:
    read_account(connection, wanted.account_id)
    query = _KEYS.where(api_keys.c.account_id == wanted.account_id).order_by(api_keys.c.created_at, api_keys.c.id)
    return _keys(connection, query, now)


@reads(FindKeys)
def find_keys(connection: Connection, wanted: FindKeys, now: float) -> dict[str, tuple[KeySnapshot, AccountSnapshot]]:
    digests = {digest for digest in wanted.digests if digest.isprintable()}  # PostgreSQL rejects NUL: see `equals`
    keys = _keys(connection, _KEYS.where(api_keys.c.digest.in_(digests)), now) if digests else []
    owners = {key.account_id for key in keys}
    found = _accounts(connection, select(accounts).where(accounts.c.id.in_(owners))) if owners else []
    by_id = {account.account_id: account for account in found}
    return {key.digest: (key, by_id[key.account_id]) for key in keys}


@reads(ReadChanges)
def read_changes(connection: Connection, wanted: ReadChanges, now: float) -> Changes:
    limit = check_page(wanted.limit)
    version = connection.execute(select(head.c.version)).scalar_one()

    def since(query: Select[Any], table: Any) -> Select[Any]:
        return query.where(table.c.version > wanted.since).order_by(table.c.version).limit(limit + 1)

    changed: list[AccountSnapshot | KeySnapshot] = [*_accounts(connection, since(select(accounts), accounts))]
    changed += _keys(connection, since(_KEYS, api_keys), now)
    changed.sort(key=lambda snapshot: snapshot.version)
    more = len(changed) > limit
    if more:
        changed = changed[:limit]
        version = changed[-1].version
    return Changes(
        version=version,
        accounts=tuple(snapshot for snapshot in changed if isinstance(snapshot, AccountSnapshot)),
        keys=tuple(snapshot for snapshot in changed if isinstance(snapshot, KeySnapshot)),
        more=more,
    )


def _accounts(connection: Connection, query: Select[Any]) -> list[AccountSnapshot]:
    rows = connection.execute(query).all()
    with_grants = {row.id for row in rows if row.granted}
    lots = grants.read_lots(connection, with_grants) if with_grants else {}
    return [
        AccountSnapshot(
            account_id=row.id,
            **_stored(row, "name", "active", "currency", "granted", "topped_up", "version", "created_at"),
            limits=_own_limits(row, ACCOUNT_LIMITS),
            expiring=tuple((lot.expires_at, lot.left) for lot in lots.get(row.id, ()) if lot.expires_at is not None),
        )
        for row in rows
    ]


def _keys(connection: Connection, query: Select[Any], now: float) -> list[KeySnapshot]:
    rows = connection.execute(query).all()
    periods = {row.id: period_at(row.budget_period, now).name for row in rows if row.budget_period}
    spend = budgets.read_spend(connection, set(periods.items())) if periods else {}
    return [
        KeySnapshot(
            key_id=row.id,
            **_stored(row, "account_id", "name", "digest", "hint", "active", "version", "created_at", "revoked_at"),
            **_stored(row, "budget", "budget_period", "expires_at"),
            models=_listed(row.models),
            tags=_listed(row.tags),
            addresses=_listed(row.addresses),
            limits=_own_limits(row, KEY_LIMITS),
            spent=spend.get((row.id, periods.get(row.id, "")), 0),
            spent_period=periods.get(row.id, ""),
            spent_version=row.account_version if row.budget_period else 0,
        )
        for row in rows
    ]


def _stored(row: Row[Any], *names: str) -> dict[str, Any]:
    return {name: row._mapping[name] for name in names}


def _listed(stored: str | None) -> tuple[str, ...] | None:
    return None if stored is None else tuple(json.loads(stored))


def _own_limits(row: Row[Any], names: Iterable[str]) -> dict[str, int]:
    return {name: limit for name, limit in _stored(row, *names).items() if limit is not None}
