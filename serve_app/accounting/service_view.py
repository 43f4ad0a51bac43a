"""Queries for operators: the usage of all accounts from the daily sums, and an account's entries.

Each query uses an index and returns a bounded number of rows, however many requests the ledger has.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, distinct, func, select

from serve_app.accounting.console_tables import users
from serve_app.accounting.journal import EntryKind, granted, topped_up
from serve_app.accounting.registry import LONG_S, reads
from serve_app.accounting.schema import accounts, api_keys, head, journal_entries, postings, usage, usage_daily
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.usage import sum_usage
from serve_app.accounting.validation import check_day, check_page
from serve_app.contracts.books import Outcome, UsageRow
from serve_app.contracts.commands import SumUsage
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.operators import (
    Entry,
    ListEntries,
    ListUncharged,
    NameSubjects,
    ServiceUsage,
    SpendingAccount,
    SumAccountDays,
    SumService,
    Uncharged,
)

MAX_NAMED = 500
MAX_SUMMED = 100  # accounts per query
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged")


@reads(SumService, timeout_s=LONG_S)
def sum_service(connection: Connection, wanted: SumService, now: float) -> ServiceUsage:
    days = sum_usage(connection, SumUsage(day_from=wanted.day_from, day_to=wanted.day_to, group_by=("day",)), now)
    daily = usage_daily.c
    within = (daily.day >= wanted.day_from, daily.day <= wanted.day_to)
    active = connection.execute(select(func.count(distinct(daily.account_id))).where(*within)).scalar_one()
    charged = func.sum(daily.charged).label("charged")
    tokens = func.sum(daily.prompt_tokens + daily.completion_tokens).label("tokens")
    largest = (
        select(daily.account_id, func.sum(daily.requests).label("requests"), tokens, charged)
        .where(*within)
        .group_by(daily.account_id)
        .order_by(charged.desc(), daily.account_id)
        .limit(check_page(wanted.top))
        .subquery()
    )
    query = select(largest, accounts.c.name).join(accounts, accounts.c.id == largest.c.account_id)
    top = connection.execute(query.order_by(largest.c.charged.desc(), largest.c.account_id)).all()
    found = (
        SpendingAccount(row.account_id, row.name, int(row.requests), int(row.tokens), int(row.charged)) for row in top
    )
    opened = select(accounts.c.currency).limit(1).scalar_subquery()  # for a service that has not set a currency yet
    currency = connection.execute(select(func.coalesce(head.c.currency, opened))).scalar_one()
    return ServiceUsage(tuple(days), int(active), tuple(found), currency or "")


@reads(SumAccountDays, timeout_s=LONG_S)
def sum_account_days(connection: Connection, wanted: SumAccountDays, _now: float) -> list[UsageRow]:
    if len(wanted.account_ids) > MAX_SUMMED:
        raise InvalidValue(f"at most {MAX_SUMMED} accounts at once")
    daily = usage_daily.c
    sums = [func.sum(daily[name]).label(name) for name in _SUMS]
    within = (daily.day >= check_day(wanted.day_from), daily.day <= check_day(wanted.day_to))
    ids = [account_id for account_id in wanted.account_ids if account_id.isprintable()]
    query = select(daily.account_id, daily.day, *sums).where(daily.account_id.in_(ids), *within)
    query = query.group_by(daily.account_id, daily.day).order_by(daily.account_id, daily.day)
    rows = connection.execute(query)
    return [UsageRow(**dict(row._mapping) | {name: int(row._mapping[name]) for name in _SUMS}) for row in rows]


@reads(ListUncharged)
def list_uncharged(connection: Connection, wanted: ListUncharged, _now: float) -> list[Uncharged]:
    shown = ("request_id", "account_id", "model", "backend", "outcome", "finished_at")
    query = select(*(usage.c[name] for name in shown)).where(usage.c.number.is_not(None))
    query = query.order_by(usage.c.number.desc()).limit(check_page(wanted.limit))
    rows = connection.execute(query)
    return [Uncharged(**dict(row._mapping) | {"outcome": Outcome(row.outcome)}) for row in rows]


@reads(ListEntries)
def list_entries(connection: Connection, wanted: ListEntries, _now: float) -> list[Entry]:
    account_id, entry, posting = read_account(connection, wanted.account_id).account_id, journal_entries.c, postings.c
    latest = (
        select(entry.id, entry.kind, entry.created_at, entry.memo)
        .where(entry.account_id == account_id, entry.kind != EntryKind.CHARGE.value)
        .order_by(entry.created_at.desc(), entry.id.desc())
        .limit(check_page(wanted.limit))
    )
    rows = connection.execute(latest).all()
    mine = (posting.entry_id.in_([row.id for row in rows]), posting.ledger_account.in_(_own(account_id)))
    summed = select(posting.entry_id, func.sum(posting.amount).label("amount")).where(*mine).group_by(posting.entry_id)
    amounts: dict[int, Any] = {row.entry_id: row.amount for row in connection.execute(summed)}
    return [Entry(row.id, row.kind, int(amounts.get(row.id, 0)), row.created_at, row.memo) for row in rows]


@reads(NameSubjects)
def name_subjects(connection: Connection, wanted: NameSubjects, _now: float) -> dict[str, str]:
    if len(wanted.ids) > MAX_NAMED:
        raise InvalidValue(f"at most {MAX_NAMED} ids at once")
    ids = [one for one in wanted.ids if one.isprintable()]
    found: dict[str, str] = {}
    for table, name in ((accounts, accounts.c.name), (api_keys, api_keys.c.name), (users, users.c.email)):
        query = select(table.c.id, name.label("name")).where(table.c.id.in_(ids))
        found |= {row.id: row.name for row in connection.execute(query)}
    return found


def _own(account_id: str) -> tuple[str, str]:
    return granted(account_id), topped_up(account_id)
