"""The check of usage rows: against the journal, the prices, and the daily aggregates."""

from __future__ import annotations

from sqlalchemy import Connection, and_, case, func, literal, or_, select, union_all

from serve_app.ledger import journal
from serve_app.ledger.difference import Difference, some
from serve_app.ledger.messages import Outcome
from serve_app.ledger.schema import journal_entries, postings, price_versions, usage, usage_daily

_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "charged", "uncollected")


def usage_entry_differences(connection: Connection) -> list[Difference]:
    """Each usage row that cost something has a charge entry of its own with its amounts, and each charge has a row."""
    cost = usage.c.charged + usage.c.uncollected
    without = select(usage.c.request_id, cost.label("cost")).where(usage.c.entry_id.is_(None), cost != 0)
    found = [
        Difference("usage", row.request_id, f"request {row.request_id} cost {row.cost} but names no journal entry")
        for row in some(connection, without.order_by(usage.c.request_id))
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
    for row in some(connection, query):
        if not row.rows:
            message = f"charge entry {row.entry_id} of {row.account_id} has no usage row: look for its request (memo)"
        elif not row.entries:
            message = f"a usage row of {row.account_id} names entry {row.entry_id}, which is no charge of that account"
        else:
            message = f"the amounts of charge entry {row.entry_id} of {row.account_id} are not those of its usage row"
        found.append(Difference("usage", f"entry {row.entry_id}", message))
    return found


def usage_price_differences(connection: Connection) -> list[Difference]:
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
        for row in some(connection, query)
    ]


def aggregate_differences(connection: Connection) -> list[Difference]:
    """Each daily aggregate is the sum of its usage rows."""
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
    for row in some(connection, query):
        off = {name: int(row._mapping[name]) for name in ("requests", *_SUMS) if row._mapping[name]}
        subject = f"{row.account_id} {row.day} {row.key_id} {row.model}"
        message = f"usage rows minus the daily aggregate of {subject}: {off}; the rows are the truth"
        found.append(Difference("aggregate", subject, message))
    return found
