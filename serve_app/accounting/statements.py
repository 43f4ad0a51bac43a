"""An account's monthly statement: opening balance, movements, usage and closing balance.

Usage counts in the month in which its request ended, in UTC, as in the daily aggregates. The opening balance is the
current balance without the movements and the usage since the month began. That usage comes from the daily aggregates,
so the charges may already be archived.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from serve_app.accounting.journal import EntryKind, granted, topped_up
from serve_app.accounting.registry import LONG_S, reads
from serve_app.accounting.schema import journal_entries, postings, usage_daily
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.usage import sum_usage
from serve_app.contracts.books import Movement, Statement
from serve_app.contracts.commands import ShowStatement, SumUsage
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.periods import month_named, period_at


@reads(ShowStatement, timeout_s=LONG_S)
def show_statement(connection: Connection, wanted: ShowStatement, now: float) -> Statement:
    account = read_account(connection, wanted.account_id)
    try:
        period = month_named(wanted.month)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    last_day = period_at("day", period.ends - 1).name
    found = _movements_since(connection, account.account_id, period.begins)
    movements = tuple(one for one in found if one.created_at < period.ends)
    in_month = SumUsage(account.account_id, day_from=f"{period.name}-01", day_to=last_day, group_by=("model",))
    usage = tuple(sum_usage(connection, in_month, now))
    used_since = select(func.coalesce(func.sum(usage_daily.c.charged), 0)).where(
        usage_daily.c.account_id == account.account_id, usage_daily.c.day >= f"{period.name}-01"
    )
    used = int(connection.execute(used_since).scalar_one())
    opening = account.granted + account.topped_up - sum(one.amount for one in found) + used
    closing = opening + sum(one.amount for one in movements) - sum(row.charged for row in usage)
    return Statement(period, opening, movements, usage, closing)


def _movements_since(connection: Connection, account_id: str, begins: float) -> list[Movement]:
    entry, posting = journal_entries.c, postings.c
    query = (
        select(entry.id, entry.kind, entry.created_at, entry.memo, func.sum(posting.amount).label("amount"))
        .select_from(journal_entries.join(postings, posting.entry_id == entry.id))
        .where(
            entry.account_id == account_id,
            entry.kind != EntryKind.CHARGE.value,
            entry.created_at >= begins,
            posting.ledger_account.in_((granted(account_id), topped_up(account_id))),
        )
        .group_by(entry.id, entry.kind, entry.created_at, entry.memo)
        .order_by(entry.created_at, entry.id)
    )
    return [Movement(row.id, row.kind, int(row.amount), row.created_at, row.memo) for row in connection.execute(query)]
