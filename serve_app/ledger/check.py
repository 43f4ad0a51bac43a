"""The audit: everything that is kept twice must agree, and what does not is named so that someone can look.

The journal is the truth. A difference is never repaired here; see the message for where to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, literal, or_, select, union_all

from serve_app.ledger import journal
from serve_app.ledger.messages import Outcome
from serve_app.ledger.schema import (
    accounts,
    api_keys,
    head,
    journal_entries,
    postings,
    price_versions,
    usage,
    usage_daily,
)

MAX_DIFFERENCES = 100  # of one kind: enough to see the pattern
_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "charged", "uncollected")


@dataclass(frozen=True, slots=True)
class Difference:
    """Two things that should agree and do not."""

    kind: str  # "entry", "balance", "aggregate", "usage", "version", "journal"
    subject: str  # the id of what to look at
    message: str


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
            *_usage_entries(connection),
            *_usage_prices(connection),
            *_aggregates(connection),
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
        for row in _some(connection, query)
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
        for row in _some(connection, query)
    ]


def _usage_entries(connection: Connection) -> list[Difference]:
    """Each usage row that cost something has a charge entry of its own with its amounts, and each charge has a row."""
    cost = usage.c.charged + usage.c.uncollected
    without = select(usage.c.request_id, cost.label("cost")).where(usage.c.entry_id.is_(None), cost != 0)
    found = [
        Difference("usage", row.request_id, f"request {row.request_id} cost {row.cost} but names no journal entry")
        for row in _some(connection, without.order_by(usage.c.request_id))
    ]

    customer = case((postings.c.ledger_account.like("customer:%"), postings.c.amount), else_=0)
    loss = case((postings.c.ledger_account == journal.LOSS_UNCOLLECTED, postings.c.amount), else_=0)
    charge = journal_entries.c.kind == journal.EntryKind.CHARGE.value
    both = union_all(
        select(
            usage.c.entry_id,
            usage.c.account_id,
            literal(1).label("rows"),
            literal(0).label("entries"),
            usage.c.charged,
            usage.c.uncollected,
        ).where(usage.c.entry_id.is_not(None)),
        select(
            journal_entries.c.id, journal_entries.c.account_id, literal(0), literal(1), literal(0), literal(0)
        ).where(charge),
        select(journal_entries.c.id, journal_entries.c.account_id, literal(0), literal(0), customer, loss)
        .select_from(journal_entries.join(postings))
        .where(charge),
    ).subquery()
    names = ("rows", "entries", "charged", "uncollected")
    rows, entries, charged, uncollected = (func.sum(both.c[name]) for name in names)
    query = (
        select(both.c.entry_id, both.c.account_id, rows.label("rows"), entries.label("entries"))
        .group_by(both.c.entry_id, both.c.account_id)
        .having(or_(rows != 1, entries != 1, charged != 0, uncollected != 0))
        .order_by(both.c.entry_id)
    )
    for row in _some(connection, query):
        if not row.rows:
            message = f"charge entry {row.entry_id} of {row.account_id} has no usage row: look for its request (memo)"
        elif not row.entries:
            message = f"a usage row of {row.account_id} names entry {row.entry_id}, which is no charge of that account"
        else:
            message = f"the amounts of charge entry {row.entry_id} of {row.account_id} are not those of its usage row"
        found.append(Difference("usage", f"entry {row.entry_id}", message))
    return found


def _usage_prices(connection: Connection) -> list[Difference]:
    """Each charge follows from the counts and the price version that the row names."""
    price = price_versions.c
    full = (
        (usage.c.prompt_tokens - usage.c.cached_tokens) * price.input
        + usage.c.cached_tokens * price.cached_input
        + usage.c.completion_tokens * price.output
    )
    nothing = and_(usage.c.outcome == Outcome.CANCELLED.value, usage.c.completion_tokens == 0)
    cost = case((or_(usage.c.outcome == Outcome.FAILED.value, nothing), 0), else_=full)
    query = (
        select(usage.c.request_id, usage.c.price_version, usage.c.charged, usage.c.uncollected, cost.label("cost"))
        .select_from(usage.join(price_versions))
        .where(or_(usage.c.charged + usage.c.uncollected != cost, price.model != usage.c.model))
        .order_by(usage.c.request_id)
    )
    return [
        Difference(
            "usage",
            row.request_id,
            f"request {row.request_id} was billed {row.charged + row.uncollected} nano-units, its counts at price "
            f"version {row.price_version} cost {int(row.cost)}: a count, an amount or a price was changed",
        )
        for row in _some(connection, query)
    ]


def _aggregates(connection: Connection) -> list[Difference]:
    names = ("account_id", "day", "key_id", "model")
    both = union_all(
        select(*(usage.c[name] for name in names), literal(1).label("requests"), *(usage.c[name] for name in _SUMS)),
        select(
            *(usage_daily.c[name] for name in names),
            *((-usage_daily.c[name]).label(name) for name in ("requests", *_SUMS)),
        ),
    ).subquery()
    group = [both.c[name] for name in names]
    sums = [func.sum(both.c[name]).label(name) for name in ("requests", *_SUMS)]
    query = select(*group, *sums).group_by(*group).having(or_(*(one != 0 for one in sums))).order_by(*group)
    found = []
    for row in _some(connection, query):
        off = {name: int(row._mapping[name]) for name in ("requests", *_SUMS) if row._mapping[name]}
        subject = f"{row.account_id} {row.day} {row.key_id} {row.model}"
        message = f"usage rows minus the daily aggregate of {subject}: {off}; the rows are the truth"
        found.append(Difference("aggregate", subject, message))
    return found


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


def _some(connection: Connection, query: Select[Any]) -> Any:
    return connection.execute(query.limit(MAX_DIFFERENCES))


def _count(connection: Connection, table: Any) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
