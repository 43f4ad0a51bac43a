"""The check: everything that is kept twice must agree, and what does not is named so that someone can look.

The journal is the truth. A difference is never repaired here; see the message for where to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, literal, or_, select, union_all

from serve_app.ledger.check_kept import audit_differences, grant_differences, key_spend_differences, reply_differences
from serve_app.ledger.check_usage import aggregate_differences, usage_entry_differences, usage_price_differences
from serve_app.ledger.difference import Difference, some
from serve_app.ledger.schema import accounts, api_keys, head, journal_entries, postings, usage


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check has read, and what did not agree: at most 100 differences of a kind."""

    accounts: int
    entries: int
    usage_rows: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.differences


def check(connection: Connection) -> CheckReport:
    """See `Ledger.check`."""
    return CheckReport(
        accounts=_count(connection, accounts),
        entries=_count(connection, journal_entries),
        usage_rows=_count(connection, usage),
        differences=(
            *_journal(connection),
            *_entries(connection),
            *_balances(connection),
            *usage_entry_differences(connection),
            *usage_price_differences(connection),
            *aggregate_differences(connection),
            *grant_differences(connection),
            *key_spend_differences(connection),
            *reply_differences(connection),
            *audit_differences(connection),
            *_versions(connection),
        ),
    )


def _journal(connection: Connection) -> list[Difference]:
    (last,) = connection.execute(select(head.c.entry)).one()
    count, highest = connection.execute(
        select(func.count(), func.coalesce(func.max(journal_entries.c.id), 0)).select_from(journal_entries)
    ).one()
    if count == highest == last:
        return []
    message = (
        f"{last} entries were written, {count} are there, the highest is {highest}: "
        "entries were removed or added behind the ledger's back; compare with a backup"
    )
    return [Difference("journal", "journal_entries", message)]


def _entries(connection: Connection) -> list[Difference]:
    total = func.coalesce(func.sum(postings.c.amount), 0)
    lines = func.count(postings.c.line)
    query = (
        select(journal_entries.c.id, journal_entries.c.kind, total.label("total"), lines.label("lines"))
        .select_from(journal_entries.outerjoin(postings))
        .group_by(journal_entries.c.id, journal_entries.c.kind)
        .having(or_(total != 0, lines < 2))
        .order_by(journal_entries.c.id)
    )
    return [
        Difference(
            "entry",
            str(row.id),
            f"the {row.lines} postings of {row.kind} entry {row.id} sum to {int(row.total)} instead of 0: "
            "a posting was changed, added or removed; compare with a backup",
        )
        for row in some(connection, query)
    ]


def _balances(connection: Connection) -> list[Difference]:
    customer = literal("customer:") + accounts.c.id
    both = union_all(
        select((customer + ":granted").label("name"), accounts.c.granted.label("held"), literal(0).label("posted")),
        select((customer + ":topped_up").label("name"), accounts.c.topped_up, literal(0)),
        select(postings.c.ledger_account, literal(0), postings.c.amount).where(
            postings.c.ledger_account.like("customer:%")
        ),
    ).subquery()
    held, posted = func.sum(both.c.held), func.sum(both.c.posted)
    query = (
        select(both.c.name, held.label("held"), posted.label("posted"))
        .group_by(both.c.name)
        .having(held != posted)
        .order_by(both.c.name)
    )
    return [
        Difference(
            "balance",
            row.name,
            f"{row.name} holds {int(row.held)} nano-units, its postings sum to {int(row.posted)}: "
            "the journal is the truth; stop the account and find who wrote the balance",
        )
        for row in some(connection, query)
    ]


def _versions(connection: Connection) -> list[Difference]:
    (last,) = connection.execute(select(head.c.version)).one()
    rows = union_all(
        *(select(table.c.id, table.c.version).where(table.c.version > last) for table in (accounts, api_keys))
    )
    return [
        Difference(
            "version",
            row.id,
            f"{row.id} has version {row.version}, the last one given out is {last}: the limiter may miss its next "
            "change; was a part of the database restored from a backup?",
        )
        for row in connection.execute(rows)
    ]


def _count(connection: Connection, table: Any) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
