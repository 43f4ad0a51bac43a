"""The check of what is kept beside journal and usage: grants, the spend of keys, stored replies, the audit log."""

from __future__ import annotations

from sqlalchemy import Connection, and_, case, func, literal, or_, select, union_all

from serve_app.ledger.difference import Difference, some
from serve_app.ledger.journal import EntryKind
from serve_app.ledger.schema import (
    accounts,
    api_keys,
    audit_log,
    grants,
    head,
    journal_entries,
    key_spend,
    postings,
    replies,
    usage,
)


def grant_differences(connection: Connection) -> list[Difference]:
    """Each grant is an entry's posting, and what is left of an account's grants is what it was given and has."""
    return _given(connection) + _left(connection)


def _given(connection: Connection) -> list[Difference]:
    posted = case((postings.c.ledger_account.like("customer:%:granted"), postings.c.amount), else_=0)
    given = journal_entries.c.kind == EntryKind.GRANT.value
    both = union_all(
        select(grants.c.entry_id, grants.c.account_id, grants.c.amount, literal(0).label("posted")),
        select(journal_entries.c.id, journal_entries.c.account_id, literal(0), posted)
        .select_from(journal_entries.join(postings))
        .where(given),
    ).subquery()
    amount, total = func.sum(both.c.amount), func.sum(both.c.posted)
    query = (
        select(both.c.entry_id, both.c.account_id, amount.label("amount"), total.label("posted"))
        .group_by(both.c.entry_id, both.c.account_id)
        .having(amount != total)
        .order_by(both.c.entry_id)
    )
    return [
        Difference(
            "grant",
            str(row.entry_id),
            f"grant {row.entry_id} of {row.account_id} is of {int(row.amount)} nano-units, its entry gives "
            f"{int(row.posted)}: the journal is the truth",
        )
        for row in some(connection, query)
    ]


def _left(connection: Connection) -> list[Difference]:
    both = union_all(
        select(accounts.c.id, accounts.c.granted.label("held"), literal(0).label("left_over")),
        select(grants.c.account_id, literal(0), grants.c.remaining),
    ).subquery()
    held, left_over = func.sum(both.c.held), func.sum(both.c.left_over)
    query = (
        select(both.c.id, held.label("held"), left_over.label("left_over"))
        .group_by(both.c.id)
        .having(held != left_over)
        .order_by(both.c.id)
    )
    return [
        Difference(
            "grant",
            row.id,
            f"{row.id} has {int(row.held)} nano-units of grants, what is left of each sums to {int(row.left_over)}: "
            "the balance follows the journal; find who wrote the grants",
        )
        for row in some(connection, query)
    ]


def key_spend_differences(connection: Connection) -> list[Difference]:
    """What a key with a budget has spent in a period is the sum of its usage rows, and no period is missing."""
    of_period = and_(
        usage.c.key_id == key_spend.c.key_id,
        func.substr(usage.c.day, 1, func.length(key_spend.c.period)) == key_spend.c.period,
    )
    total = func.coalesce(func.sum(usage.c.charged), 0)
    query = (
        select(key_spend.c.key_id, key_spend.c.period, key_spend.c.charged, total.label("total"))
        .select_from(key_spend.outerjoin(usage, of_period))
        .group_by(key_spend.c.key_id, key_spend.c.period, key_spend.c.charged)
        .having(key_spend.c.charged != total)
        .order_by(key_spend.c.key_id, key_spend.c.period)
    )
    found = [
        Difference(
            "key_spend",
            row.key_id,
            f"{row.key_id} is said to have spent {row.charged} nano-units in {row.period}, its usage rows sum to "
            f"{int(row.total)}: the rows are the truth",
        )
        for row in some(connection, query)
    ]
    return found + _periods(connection)


def _periods(connection: Connection) -> list[Difference]:
    """Each key's spending is counted in the periods of its budget, up to the one that it was used in last."""
    length = case((api_keys.c.budget_period == "day", 10), (api_keys.c.budget_period == "month", 7), else_=0)
    amiss = func.sum(case((func.length(key_spend.c.period) != length, 1), else_=0))
    kept = (
        select(key_spend.c.key_id, func.max(key_spend.c.period).label("last"), amiss.label("amiss"))
        .select_from(key_spend.join(api_keys))
        .group_by(key_spend.c.key_id)
        .subquery()
    )
    used = select(usage.c.key_id, func.max(usage.c.day).label("day")).group_by(usage.c.key_id).subquery()
    missing = or_(kept.c.last.is_(None), func.substr(used.c.day, 1, length) > kept.c.last)
    query = (
        select(api_keys.c.id, api_keys.c.budget_period, kept.c.last, used.c.day)
        .select_from(
            api_keys.outerjoin(kept, kept.c.key_id == api_keys.c.id).outerjoin(used, used.c.key_id == api_keys.c.id)
        )
        .where(or_(kept.c.amiss > 0, and_(api_keys.c.budget_period.is_not(None), missing)))
        .order_by(api_keys.c.id)
    )
    return [
        Difference(
            "key_spend",
            row.id,
            f"{row.id} has a budget per {row.budget_period or 'nothing'} and was used up to {row.day}; what it spent "
            f"is counted in other periods, or only up to {row.last}: set its budget anew",
        )
        for row in some(connection, query)
    ]


def reply_differences(connection: Connection) -> list[Difference]:
    """Each stored reply is that of a request of the same account."""
    query = (
        select(replies.c.account_id, replies.c.idempotency_key, replies.c.request_id)
        .select_from(replies.outerjoin(usage, usage.c.request_id == replies.c.request_id))
        .where(or_(usage.c.request_id.is_(None), usage.c.account_id != replies.c.account_id))
        .order_by(replies.c.account_id, replies.c.idempotency_key)
    )
    return [
        Difference(
            "reply",
            row.account_id,
            f"the reply that {row.account_id} stored under {row.idempotency_key!r} refers to request "
            f"{row.request_id}, of which it has no usage row: remove it, or it answers for what was not billed",
        )
        for row in some(connection, query)
    ]


def audit_differences(connection: Connection) -> list[Difference]:
    """The audit log's numbers have no gap and end where the ledger says."""
    last = connection.execute(select(head.c.audit)).scalar_one()
    count, highest = connection.execute(
        select(func.count(), func.coalesce(func.max(audit_log.c.id), 0)).select_from(audit_log)
    ).one()
    if count == highest == last:
        return []
    message = (
        f"{last} records were written to the audit log, {count} are there, the highest is {highest}: "
        "records were removed or added behind the ledger's back; compare with a backup"
    )
    return [Difference("audit", "audit_log", message)]
