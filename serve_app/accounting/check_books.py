"""Compares data that the ledger stores twice and that must agree. Reports differences, and does not repair them.

The journal is authoritative for amounts, the usage rows for counts; each message says where to look. A comparison reads
a part of the journal with its usage rows, or compares some accounts with the sums of a checkpoint. `checkpoints` runs
the comparisons in steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    Select,
    Subquery,
    Table,
    and_,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
)

from serve_app.accounting import journal
from serve_app.accounting.journal import EntryKind
from serve_app.accounting.schema import (
    COUNTS,
    DAILY_GROUP,
    DAILY_SUMS,
    accounts,
    api_keys,
    audit_log,
    checkpoint_balances,
    checkpoint_daily,
    grants,
    head,
    journal_entries,
    key_spend,
    postings,
    price_versions,
    replies,
    usage,
    usage_daily,
)
from serve_app.contracts.books import Difference, Outcome

MAX_DIFFERENCES = 100  # per kind: enough to see the pattern


@dataclass(frozen=True, slots=True)
class Part:
    """Journal entries with `after_entry` < id <= `entry`, and their usage rows.

    Also includes usage rows without an entry, with `after_number` < number <= `number`.
    If `entry` or `number` is None, that range has no upper end.
    """

    after_entry: int
    after_number: int
    entry: int | None = None
    number: int | None = None

    def of_entries(self, entry_id: Any) -> list[ColumnElement[bool]]:
        return [entry_id > self.after_entry, *([] if self.entry is None else [entry_id <= self.entry])]

    def of_numbers(self) -> list[ColumnElement[bool]]:
        last = [] if self.number is None else [usage.c.number <= self.number]
        return [usage.c.number > self.after_number, *last, usage.c.entry_id.is_(None)]

    def usage_rows(self, *columns: Any) -> CompoundSelect[Any]:
        """Returns a query for these columns of the part's usage rows."""
        return union_all(
            select(*columns).where(*self.of_entries(usage.c.entry_id)), select(*columns).where(*self.of_numbers())
        )


@dataclass(frozen=True, slots=True)
class Proven:
    """The sums of a checkpoint and of the closing checkpoints that it builds on, and the rows after the checkpoint.

    Archiving writes the closing checkpoints: see `archive.py`.
    """

    checkpoint_ids: tuple[int, ...]
    entries: int  # number of journal entries that these sums include
    since: Part


@dataclass(frozen=True, slots=True)
class AccountRange:
    """Account ids with `after` < id <= `last`, and the existing ids among them. `last` is None: no upper end."""

    after: str
    last: str | None
    account_ids: Sequence[str]

    def of(self, account_id: Any) -> list[ColumnElement[bool]]:
        return [account_id > self.after, *([] if self.last is None else [account_id <= self.last])]


def compare_part(connection: Connection, part: Part) -> Iterator[Difference]:
    """Yields the differences within a part. They do not depend on rows outside it."""
    yield from _entries(connection, part)
    yield from _charges(connection, part)
    yield from _costs(connection, part)
    yield from _grants(connection, part)


def compare_accounts(connection: Connection, proven: Proven, some: AccountRange) -> Iterator[Difference]:
    """Yields the differences between stored data of some accounts and their rows. `connection` reads one snapshot."""
    yield from _balances(connection, proven, some)
    yield from _aggregates(connection, proven, some)
    yield from _remainders(connection, some)
    counted = exists().where(key_spend.c.key_id == api_keys.c.id)
    with_budget = select(api_keys.c.id).where(
        *some.of(api_keys.c.account_id), or_(api_keys.c.budget_period.is_not(None), counted)
    )
    if connection.execute(with_budget.limit(1)).first() is not None:
        yield from _key_spend(connection, proven, some)
        yield from _key_periods(connection, proven, some)
    yield from _replies(connection, some)


def compare_whole(connection: Connection, proven: Proven) -> Iterator[Difference]:
    yield from _without_account(connection, proven)
    yield from _numbers(connection, "journal", journal_entries, head.c.entry, proven.entries, proven.since.after_entry)
    yield from _numbers(connection, "audit", audit_log, head.c.audit, 0, 0)
    yield from _versions(connection)


def _first(connection: Connection, query: Select[Any]) -> Iterator[Row[Any]]:
    yield from connection.execute(query.limit(MAX_DIFFERENCES))


def _numbers(
    connection: Connection, kind: str, table: Table, last_number: Any, read: int, up_to: int
) -> Iterator[Difference]:
    """Checks that row numbers have no gap and end at the last number assigned.

    `read` is the number of rows up to `up_to`.
    """
    last = connection.execute(select(last_number)).scalar_one()
    count = read + connection.execute(select(func.count()).select_from(table).where(table.c.id > up_to)).scalar_one()
    # The row with the highest number may be archived. If no row up to `up_to` is missing, `up_to` counts, too.
    highest = connection.execute(select(func.coalesce(func.max(table.c.id), 0))).scalar_one()
    highest = max(highest, up_to) if read == up_to else highest
    if not count == highest == last:
        what = "entries were written" if table is journal_entries else "records were written to the audit log"
        message = (
            f"{last} {what}, {count} exist, the highest number is {highest}: "
            "some were removed or added outside the ledger; compare with a backup"
        )
        yield Difference(kind, table.name, message)


def _entries(connection: Connection, part: Part) -> Iterator[Difference]:
    """Checks that the postings of each entry sum to zero."""
    total = func.coalesce(func.sum(postings.c.amount), 0)
    lines = func.count(postings.c.line)
    query = (
        select(journal_entries.c.id, journal_entries.c.kind, total.label("total"), lines.label("lines"))
        .select_from(journal_entries.outerjoin(postings))
        .where(*part.of_entries(journal_entries.c.id))
        .group_by(journal_entries.c.id, journal_entries.c.kind)
        .having(or_(total != 0, lines < 2))
        .order_by(journal_entries.c.id)
    )
    for row in _first(connection, query):
        message = (
            f"the {row.lines} postings of {row.kind} entry {row.id} sum to {int(row.total)} instead of 0: "
            "a posting was changed, added or removed; compare with a backup"
        )
        yield Difference("entry", str(row.id), message)


def _unequal(
    connection: Connection, kept: Select[Any], counted: Select[Any] | CompoundSelect[Any]
) -> Iterator[tuple[Any, ...]]:
    """Compares two queries of (*names, amount). Yields (*names, sum stored, sum counted) where they differ."""
    *names, amount = kept.subquery().c
    *counted_names, counted_amount = counted.subquery().c
    both = union_all(
        select(*names, amount.label("kept"), literal(0).label("counted")),
        select(*counted_names, literal(0), counted_amount),
    ).subquery()
    *names, amount, counted_amount = both.c
    sums = func.sum(amount), func.sum(counted_amount)
    query = select(*names, *sums).group_by(*names).having(sums[0] != sums[1]).order_by(*names)
    for row in _first(connection, query):
        *values, has, gives = tuple[Any, ...](row)
        yield *values, int(has), int(gives)


def _balances(connection: Connection, proven: Proven, some: AccountRange) -> Iterator[Difference]:
    """Checks that each balance is the sum of its postings."""
    customer, mine = literal("customer:") + accounts.c.id, accounts.c.id.in_(some.account_ids)
    held = union_all(
        select((customer + ":granted").label("name"), accounts.c.granted.label("amount")).where(mine),
        select(customer + ":topped_up", accounts.c.topped_up).where(mine),
    ).subquery()
    # Selected by name, not by range: a database may sort the names differently from the ids in them.
    names = [name(account_id) for account_id in some.account_ids for name in (journal.granted, journal.topped_up)]
    sums = checkpoint_balances.c
    posted = union_all(
        select(sums.ledger_account, sums.amount).where(
            sums.checkpoint_id.in_(proven.checkpoint_ids), sums.ledger_account.in_(names)
        ),
        select(postings.c.ledger_account, postings.c.amount).where(
            *proven.since.of_entries(postings.c.entry_id), postings.c.ledger_account.in_(names)
        ),
    )
    for name, balance, total in _unequal(connection, select(held), posted):
        message = (
            f"{name} holds {balance} nano-units, its postings sum to {total}: "
            "the journal is authoritative; suspend the account and find who wrote the balance"
        )
        yield Difference("balance", name, message)


def _without_account(connection: Connection, proven: Proven) -> Iterator[Difference]:
    """Checks that every customer with postings has an account."""
    sums = checkpoint_balances.c
    end = func.length(sums.ledger_account) - len("customer::granted")
    both = [func.substr(sums.ledger_account, 10, end - less) for less in (0, 2)]  # the ids before :granted, :topped_up
    query = (
        select(sums.ledger_account, func.sum(sums.amount).label("total"))
        .where(
            sums.checkpoint_id.in_(proven.checkpoint_ids),
            sums.ledger_account.like("customer:%"),
            *(~select(accounts.c.id).where(accounts.c.id == one).exists() for one in both),
        )
        .group_by(sums.ledger_account)
        .having(func.sum(sums.amount) != 0)
    )
    for row in _first(connection, query.order_by(sums.ledger_account)):
        message = f"{row.ledger_account} has no account, its postings sum to {int(row.total)}: find their entries"
        yield Difference("balance", row.ledger_account, message)


def _charges(connection: Connection, part: Part) -> Iterator[Difference]:
    """Checks that each usage row with a cost has one charge entry with the same amounts, and vice versa."""
    cost = usage.c.charged + usage.c.uncollected
    without = select(usage.c.request_id, cost.label("cost")).where(*part.of_numbers(), cost != 0)
    for row in _first(connection, without.order_by(usage.c.request_id)):
        message = f"request {row.request_id} cost {row.cost} but names no journal entry"
        yield Difference("usage", row.request_id, message)

    customer = case((postings.c.ledger_account.like("customer:%"), postings.c.amount), else_=0)
    loss = case((postings.c.ledger_account == journal.LOSS_UNCOLLECTED, postings.c.amount), else_=0)
    entry = (journal_entries.c.id, journal_entries.c.account_id)
    charge = (journal_entries.c.kind == EntryKind.CHARGE.value, *part.of_entries(journal_entries.c.id))
    names = ("rows", "entries", "charged", "uncollected")
    one_row = (literal(1).label("rows"), literal(0).label("entries"), usage.c.charged, usage.c.uncollected)
    both = union_all(
        select(usage.c.entry_id, usage.c.account_id, *one_row).where(*part.of_entries(usage.c.entry_id)),
        select(*entry, literal(0), literal(1), literal(0), literal(0)).where(*charge),
        select(*entry, literal(0), literal(0), customer, loss)
        .select_from(journal_entries.join(postings))
        .where(*charge),
    ).subquery()
    rows, entries, charged, uncollected = (func.sum(both.c[name]) for name in names)
    query = (
        select(both.c.entry_id, both.c.account_id, rows.label("rows"), entries.label("entries"))
        .group_by(both.c.entry_id, both.c.account_id)
        .having(or_(rows != 1, entries != 1, charged != 0, uncollected != 0))
        .order_by(both.c.entry_id)
    )
    for row in _first(connection, query):
        if not row.rows:
            message = f"charge entry {row.entry_id} of {row.account_id} has no usage row: its memo is the request's id"
        elif not row.entries:
            message = (
                f"a usage row of {row.account_id} names entry {row.entry_id}, which is not a charge of that account"
            )
        else:
            message = f"the amounts of charge entry {row.entry_id} of {row.account_id} are not those of its usage row"
        yield Difference("usage", f"entry {row.entry_id}", message)


def _costs(connection: Connection, part: Part) -> Iterator[Difference]:
    """Checks that each charge is the cost of the row's token counts at its price version."""
    names = ("request_id", "model", "price_version", "outcome", *COUNTS)
    price, rows = price_versions.c, part.usage_rows(*(usage.c[name] for name in names)).subquery()
    full = (
        (rows.c.prompt_tokens - rows.c.cached_tokens) * price.input
        + rows.c.cached_tokens * price.cached_input
        + rows.c.completion_tokens * price.output
    )
    nothing = and_(rows.c.outcome == Outcome.CANCELLED.value, rows.c.completion_tokens == 0)
    cost = case((or_(rows.c.outcome == Outcome.FAILED.value, nothing), 0), else_=full)
    query = (
        select(rows.c.request_id, rows.c.price_version, rows.c.charged, rows.c.uncollected, cost.label("cost"))
        .select_from(rows.join(price_versions, price.id == rows.c.price_version))
        .where(or_(rows.c.charged + rows.c.uncollected != cost, price.model != rows.c.model))
        .order_by(rows.c.request_id)
    )
    for row in _first(connection, query):
        message = (
            f"request {row.request_id} was billed {row.charged + row.uncollected} nano-units, its counts at price "
            f"version {row.price_version} cost {int(row.cost)}: a count, an amount or a price was changed"
        )
        yield Difference("usage", row.request_id, message)


def _aggregates(connection: Connection, proven: Proven, some: AccountRange) -> Iterator[Difference]:
    """Checks that each daily aggregate is the sum of its usage rows."""
    kept = select(
        *(usage_daily.c[name] for name in DAILY_GROUP), *((-usage_daily.c[name]).label(name) for name in DAILY_SUMS)
    ).where(*some.of(usage_daily.c.account_id))
    both = union_all(kept, select(*_counted_daily(proven, some).c)).subquery()
    group = [both.c[name] for name in DAILY_GROUP]
    sums = [func.sum(both.c[name]).label(name) for name in DAILY_SUMS]
    query = select(*group, *sums).group_by(*group).having(or_(*(total != 0 for total in sums))).order_by(*group)
    for row in _first(connection, query):
        off = {name: int(row._mapping[name]) for name in DAILY_SUMS if row._mapping[name]}
        subject = f"{row.account_id} {row.day} {row.key_id} {row.model}"
        message = f"usage rows minus the daily aggregate of {subject}: {off}; the usage rows are authoritative"
        yield Difference("aggregate", subject, message)


def _counted_daily(proven: Proven, some: AccountRange) -> Subquery:
    """Returns sums of some accounts' usage rows, in rows like those of `usage_daily`. A group may have several rows."""
    sums = select(*(checkpoint_daily.c[name] for name in (*DAILY_GROUP, *DAILY_SUMS))).where(
        checkpoint_daily.c.checkpoint_id.in_(proven.checkpoint_ids), *some.of(checkpoint_daily.c.account_id)
    )
    one = {"requests": literal(1).label("requests")}
    columns = [one.get(name, usage.c.get(name)) for name in (*DAILY_GROUP, *DAILY_SUMS)]
    since = proven.since.usage_rows(*columns).subquery()
    return union_all(sums, select(*since.c).where(*some.of(since.c.account_id))).subquery()


def _grants(connection: Connection, part: Part) -> Iterator[Difference]:
    """Checks that each grant has the amount that its entry posts."""
    amount = case((postings.c.ledger_account.like("customer:%:granted"), postings.c.amount), else_=0)
    posted = (
        select(journal_entries.c.id, journal_entries.c.account_id, amount.label("amount"))
        .select_from(journal_entries.join(postings))
        .where(journal_entries.c.kind == EntryKind.GRANT.value, *part.of_entries(journal_entries.c.id))
    )
    given = select(grants.c.entry_id, grants.c.account_id, grants.c.amount).where(*part.of_entries(grants.c.entry_id))
    for entry_id, account_id, has, gives in _unequal(connection, given, posted):
        message = (
            f"grant {entry_id} of {account_id} has an amount of {has} nano-units, its entry posts {gives}: "
            "the journal is authoritative"
        )
        yield Difference("grant", str(entry_id), message)


def _remainders(connection: Connection, some: AccountRange) -> Iterator[Difference]:
    """Checks that the remainders of an account's grants sum to its granted balance."""
    held = select(accounts.c.id, accounts.c.granted).where(*some.of(accounts.c.id))
    rest = select(grants.c.account_id, grants.c.remaining).where(*some.of(grants.c.account_id), grants.c.remaining > 0)
    for account_id, granted, left in _unequal(connection, held, rest):
        message = (
            f"{account_id} has a granted balance of {granted} nano-units, the remainders of its grants sum to {left}: "
            "the balance follows the journal; find who wrote the grants"
        )
        yield Difference("grant", account_id, message)


def _key_spend(connection: Connection, proven: Proven, some: AccountRange) -> Iterator[Difference]:
    """Checks each key with a budget: a period's stored spending is the sum of the key's usage rows in that period."""
    counted = _counted_daily(proven, some).c
    periods = (counted.day.label("period"), func.substr(counted.day, 1, 7).label("period"))
    both = union_all(*(select(counted.key_id, period, counted.charged) for period in periods)).subquery().c
    spent = (
        select(both.key_id, both.period, func.sum(both.charged).label("total"))
        .group_by(both.key_id, both.period)
        .subquery()
    )
    of_period = and_(spent.c.key_id == key_spend.c.key_id, spent.c.period == key_spend.c.period)
    total = func.coalesce(spent.c.total, 0)
    query = (
        select(key_spend.c.key_id, key_spend.c.period, key_spend.c.charged, total.label("total"))
        .select_from(key_spend.join(api_keys).outerjoin(spent, of_period))
        .where(*some.of(api_keys.c.account_id), key_spend.c.charged != total)
        .order_by(key_spend.c.key_id, key_spend.c.period)
    )
    for row in _first(connection, query):
        message = (
            f"{row.key_id} has {row.charged} nano-units counted as spent in {row.period}, its usage rows sum to "
            f"{int(row.total)}: the usage rows are authoritative"
        )
        yield Difference("key_spend", row.key_id, message)


def _key_periods(connection: Connection, proven: Proven, some: AccountRange) -> Iterator[Difference]:
    """Checks that each key's spending is counted in the periods of its budget, up to the period of its last use."""
    length = case((api_keys.c.budget_period == "day", 10), (api_keys.c.budget_period == "month", 7), else_=0)
    wrong = func.sum(case((func.length(key_spend.c.period) != length, 1), else_=0))
    kept = (
        select(key_spend.c.key_id, func.max(key_spend.c.period).label("last"), wrong.label("wrong"))
        .select_from(key_spend.join(api_keys))
        .where(*some.of(api_keys.c.account_id))
        .group_by(key_spend.c.key_id)
        .subquery()
    )
    counted = _counted_daily(proven, some).c
    used = select(counted.key_id, func.max(counted.day).label("day")).group_by(counted.key_id).subquery()
    missing = or_(kept.c.last.is_(None), func.substr(used.c.day, 1, length) > kept.c.last)
    query = (
        select(api_keys.c.id, api_keys.c.budget_period, kept.c.last, kept.c.wrong, used.c.day)
        .select_from(
            api_keys.outerjoin(kept, kept.c.key_id == api_keys.c.id).outerjoin(used, used.c.key_id == api_keys.c.id)
        )
        .where(
            *some.of(api_keys.c.account_id),
            or_(kept.c.wrong > 0, and_(api_keys.c.budget_period.is_not(None), missing)),
        )
        .order_by(api_keys.c.id)
    )
    for row in _first(connection, query):
        # The ledger counts the spending again only when the budget's period changes.
        budget, remedy = "no budget", "set a budget, then remove it"
        if row.budget_period:
            budget, remedy = f"a budget per {row.budget_period}", "remove its budget, then set it again"
        use = f"was last used on {row.day}" if row.day else "was never used"
        if row.last is None:
            period = "in no period"
        elif row.wrong and row.budget_period:
            period = "in periods of another length"
        else:
            period = f"{'only ' if row.budget_period else ''}up to {row.last}"
        message = f"{row.id} has {budget} and {use}; its spending is counted {period}: {remedy}"
        yield Difference("key_spend", row.id, message)


def _replies(connection: Connection, some: AccountRange) -> Iterator[Difference]:
    """Checks that each stored reply belongs to a request of the same account."""
    query = (
        select(replies.c.account_id, replies.c.idempotency_key, replies.c.request_id)
        .select_from(replies.outerjoin(usage, usage.c.request_id == replies.c.request_id))
        .where(
            *some.of(replies.c.account_id),
            or_(usage.c.request_id.is_(None), usage.c.account_id != replies.c.account_id),
        )
        .order_by(replies.c.account_id, replies.c.idempotency_key)
    )
    for row in _first(connection, query):
        message = (
            f"the reply that {row.account_id} stored under {row.idempotency_key!r} refers to request "
            f"{row.request_id}, which has no usage row for that account: delete the stored reply, or a retry gets a "
            "reply that was not billed to the account"
        )
        yield Difference("reply", row.account_id, message)


def _versions(connection: Connection) -> Iterator[Difference]:
    """Checks that no account or key has a version that was never assigned."""
    last = connection.execute(select(head.c.version)).scalar_one()
    rows = union_all(
        *(select(table.c.id, table.c.version).where(table.c.version > last) for table in (accounts, api_keys))
    )
    for row in connection.execute(rows):
        message = (
            f"{row.id} has version {row.version}, the last one assigned is {last}: the limiter may miss its next "
            "change; was a part of the database restored from a backup?"
        )
        yield Difference("version", row.id, message)
