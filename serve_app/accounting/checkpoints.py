"""Runs a check of the books in steps. Each step reads a part of the ledger, and a checkpoint stores what was verified.

A forward step compares the next rows of the journal and of the usage with each other, adds their sums to the
checkpoint, and moves the checkpoint past them. The checkpoint moves up to the place where the ledger ended when the
check began. After that, each step compares some accounts on one snapshot: their stored data against the checkpoint's
sums plus the rows added since. No step is therefore long, settlements continue, and an interrupted check leaves a
checkpoint to continue from.

Several checks may run at once: a step moves a checkpoint only if no other check has moved it meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

from sqlalchemy import Connection, CursorResult, delete, func, insert, literal, select, update

from serve_app.accounting.check_books import (
    AccountRange,
    Part,
    Proven,
    compare_accounts,
    compare_part,
    compare_whole,
)
from serve_app.accounting.database import Transaction
from serve_app.accounting.dialects import add_up, delete_some, insert_if_new, rows_at_once
from serve_app.accounting.registry import runs_in_steps
from serve_app.accounting.schema import (
    COUNTS,
    DAILY_GROUP,
    DAILY_SUMS,
    accounts,
    checkpoint_balances,
    checkpoint_daily,
    checkpoint_differences,
    checkpoints,
    head,
    journal_entries,
    postings,
    usage,
)
from serve_app.contracts.books import CheckReport, Difference
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import Conflict, InvalidValue

ACCOUNTS = 200  # number of accounts compared per step
MAX_KEPT = 1000  # differences per checkpoint
ABANDONED_S = 3600.0  # a full check without progress for this time is abandoned


class Books(Protocol):
    """The part of `database.Database` that a check needs."""

    def snapshot(self) -> AbstractContextManager[Connection]: ...
    def aside(self) -> AbstractContextManager[Connection]: ...
    def transaction(self) -> AbstractContextManager[Transaction]: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Progress of a check: the checkpoint that it moves, its target, and the last account that it has compared."""

    checkpoint_id: int
    entry: int
    number: int
    compared: int = 0  # number of accounts
    account_id: str = ""


NOT_BEGUN = Place(0, 0, 0)


@runs_in_steps(CheckBooks)
def check_books(database: Books, wanted: CheckBooks, now: float) -> CheckReport:
    """Runs steps for about `wanted.seconds`, but at least one step."""
    until = time.monotonic() + wanted.seconds
    found: list[Difference] = []
    place: Place | None = NOT_BEGUN if wanted.after is None else _parse(wanted.after)
    if place == NOT_BEGUN:
        place = _begin(database, full=wanted.full, now=now, until=until)
        with database.snapshot() as connection:
            kept = select(checkpoint_differences).where(_of(checkpoint_differences, place.checkpoint_id))
            found += [Difference(row.kind, row.subject, row.message) for row in connection.execute(kept)]
    while place is not None:
        last, place = place, _step(database, place, found, now)
        if time.monotonic() >= until:
            break
    if place is None:
        remove_old(database, now, until)
    with database.snapshot() as connection:
        return _report(connection, last, place, found)


def _report(connection: Connection, last: Place, place: Place | None, found: Iterable[Difference]) -> CheckReport:
    at = _read(connection, last.checkpoint_id)
    columns = (func.sum(checkpoints.c.entries), func.sum(checkpoints.c.usage_rows))
    entries, rows = connection.execute(select(*columns).where(checkpoints.c.id.in_(_all_ids(connection, at)))).one()
    count = connection.execute(select(func.count()).select_from(accounts)).scalar_one()
    total, compared = max(1, last.entry + last.number + count), 0 if place is None else place.compared
    done = (min(at.entry, last.entry) + min(at.number, last.number) + compared) / total
    return CheckReport(
        accounts=count,
        entries=int(entries),
        usage_rows=int(rows),
        differences=tuple(dict.fromkeys(found)),
        next=None if place is None else ":".join(map(str, astuple(place))),
        done=1.0 if place is None else min(done, 0.99),
    )


def _parse(after: str) -> Place:
    try:
        checkpoint_id, entry, number, compared, account_id = after.split(":", 4)
        return Place(int(checkpoint_id), int(entry), int(number), int(compared), account_id)
    except ValueError:
        raise InvalidValue(f"invalid `after` {after!r}: pass the `next` of the previous response") from None


def _step(database: Books, place: Place, found: list[Difference], now: float) -> Place | None:
    """Runs one step. Returns the place after it, or None if the check is complete."""
    with database.snapshot() as connection:
        at = _read(connection, place.checkpoint_id)
        size = rows_at_once(connection)
        part = next_part(connection, at, size)
        ahead, more = (part.entry or 0) - at.entry, (part.number or 0) - at.number
        if (ahead and at.entry < place.entry) or (more and at.number < place.number) or ahead + more >= size:
            wrong = [*compare_part(connection, part)]
        else:
            after = _compare_some(connection, at, place, found)
            if after is not None:
                return after
            wrong = None
    if wrong is None:
        _finish(database, place.checkpoint_id, now)
        return None
    with database.aside() as connection:
        if advance(connection, at.id, part, wrong, now):
            found += wrong
    return place


def _compare_some(connection: Connection, at: Any, place: Place, found: list[Difference]) -> Place | None:
    """Compares the next accounts. Returns the place after them, or None if all are compared."""
    since = Part(at.entry, at.number)
    totals = select(func.sum(checkpoints.c.entries)).where(checkpoints.c.id.in_(_all_ids(connection, at)))
    proven = Proven(tuple(_all_ids(connection, at)), int(connection.execute(totals).scalar_one()), since)
    query = select(accounts.c.id).where(accounts.c.id > place.account_id).order_by(accounts.c.id).limit(ACCOUNTS)
    account_ids = connection.execute(query).scalars().all()
    some = AccountRange(place.account_id, account_ids[-1] if len(account_ids) == ACCOUNTS else None, account_ids)
    found += compare_accounts(connection, proven, some)
    if some.last is not None:
        return replace(place, compared=place.compared + len(account_ids), account_id=some.last)
    found += compare_whole(connection, proven)
    return None


def next_part(connection: Connection, at: Any, size: int) -> Part:
    """Returns the next rows after a checkpoint, about `size` of each kind, up to the end of the ledger."""
    last = connection.execute(select(head.c.entry)).scalar_one()
    some = select(usage.c.number).where(usage.c.number > at.number).order_by(usage.c.number).limit(size).subquery()
    number = connection.execute(select(func.max(some.c.number))).scalar_one()
    entry = max(at.entry, min(at.entry + size, last))
    return Part(at.entry, at.number, entry, at.number if number is None else number)


def advance(connection: Connection, checkpoint_id: int, part: Part, wrong: Iterable[Difference], now: float) -> bool:
    """Moves a checkpoint from the start of a part to its end, and adds the part's sums.

    Returns False if the checkpoint is no longer at the start.
    """
    entries = select(func.count()).select_from(journal_entries).where(*part.of_entries(journal_entries.c.id))
    rows = part.usage_rows(usage.c.request_id).subquery()
    added = {
        "entries": checkpoints.c.entries + entries.scalar_subquery(),
        "usage_rows": checkpoints.c.usage_rows + select(func.count()).select_from(rows).scalar_subquery(),
    }
    moved: CursorResult[Any] = connection.execute(
        update(checkpoints)
        .where(
            checkpoints.c.id == checkpoint_id,
            checkpoints.c.entry == part.after_entry,
            checkpoints.c.number == part.after_number,
        )
        .values(entry=part.entry, number=part.number, updated_at=now, **added)
    )
    if not moved.rowcount:
        return False
    posted = (
        select(literal(checkpoint_id), postings.c.ledger_account, func.sum(postings.c.amount))
        .where(*part.of_entries(postings.c.entry_id))
        .group_by(postings.c.ledger_account)
    )
    add_up(connection, checkpoint_balances, ("amount",), posted)
    used = part.usage_rows(*(usage.c[name] for name in (*DAILY_GROUP, *COUNTS))).subquery()
    group = [used.c[name] for name in DAILY_GROUP]
    sums = [func.count(), *(func.sum(used.c[name]) for name in COUNTS)]
    add_up(connection, checkpoint_daily, DAILY_SUMS, select(literal(checkpoint_id), *group, *sums).group_by(*group))
    kept = select(func.count()).select_from(checkpoint_differences).where(_of(checkpoint_differences, checkpoint_id))
    if connection.execute(kept).scalar_one() < MAX_KEPT:
        for one in wrong:
            row = {"checkpoint_id": checkpoint_id, "kind": one.kind, "subject": one.subject, "message": one.message}
            insert_if_new(connection, checkpoint_differences, row)
    return True


def begin_checkpoint(connection: Connection, kind: str, now: float) -> int:
    """Creates a checkpoint at the end of the last archive, with no rows verified yet, and returns its id."""
    closings = select(checkpoints).where(checkpoints.c.kind == "closing", checkpoints.c.proven_at.is_not(None))
    last = connection.execute(closings.order_by(checkpoints.c.id.desc()).limit(1)).one_or_none()
    closing, entry, number = (0, 0, 0) if last is None else (last.id, last.entry, last.number)
    row = {"kind": kind, "closing": closing, "entry": entry, "number": number, "entries": 0, "usage_rows": 0}
    added = insert(checkpoints).values(**row, updated_at=now).returning(checkpoints.c.id)
    return int(connection.execute(added).scalar_one())


def _begin(database: Books, *, full: bool, now: float, until: float) -> Place:
    remove_old(database, now, until)
    with database.aside() as connection:
        of_kind = select(checkpoints.c.id).where(checkpoints.c.kind == "last").order_by(checkpoints.c.id.desc())
        checkpoint_id = None if full else connection.execute(of_kind.limit(1)).scalar()
        if checkpoint_id is None:
            checkpoint_id = begin_checkpoint(connection, "full" if full else "last", now)
    with database.snapshot() as connection:
        entry = connection.execute(select(head.c.entry)).scalar_one()
        number = connection.execute(select(func.coalesce(func.max(usage.c.number), 0))).scalar_one()
        return Place(checkpoint_id, entry, number)


def _finish(database: Books, checkpoint_id: int, now: float) -> None:
    with database.aside() as connection:
        mine = checkpoints.c.id == checkpoint_id
        replaced = update(checkpoints).where(checkpoints.c.kind == "last", ~mine).values(kind="old")
        connection.execute(replaced)
        connection.execute(update(checkpoints).where(mine).values(kind="last", proven_at=now))


def remove_old(database: Books, now: float, until: float = math.inf) -> None:
    """Removes replaced checkpoints and abandoned full checks, in batches of rows.

    Stops at `until`, on the monotonic clock. The next check removes the rest.
    """
    given_up = (checkpoints.c.kind == "full") & (checkpoints.c.updated_at < now - ABANDONED_S)
    with database.snapshot() as connection:
        ids = connection.execute(select(checkpoints.c.id).where((checkpoints.c.kind == "old") | given_up)).scalars()
        old = ids.all()
    tables = (checkpoint_balances, checkpoint_daily, checkpoint_differences)
    for checkpoint_id in old:
        # First mark it as old: no check may continue from a checkpoint with incomplete sums.
        with database.aside() as connection:
            connection.execute(update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(kind="old"))
        while True:
            with database.aside() as connection:
                if not any(delete_some(connection, table, checkpoint_id=checkpoint_id) for table in tables):
                    break
            if time.monotonic() >= until:
                return
        with database.aside() as connection:
            connection.execute(delete(checkpoints).where(checkpoints.c.id == checkpoint_id))


def _of(table: Any, checkpoint_id: int) -> Any:
    return table.c.checkpoint_id == checkpoint_id


def _read(connection: Connection, checkpoint_id: int) -> Any:
    """Returns the row of a running check's checkpoint. Raises Conflict if it was replaced or removed."""
    mine = (checkpoints.c.id == checkpoint_id, checkpoints.c.kind.in_(("last", "full")))
    row = connection.execute(select(checkpoints).where(*mine)).one_or_none()
    if row is None:
        raise Conflict("another full check or an archive has replaced what this check builds on: begin again")
    return row


def _all_ids(connection: Connection, at: Any) -> list[int]:
    """Returns the ids of the checkpoint and of the closing checkpoints that it builds on."""
    closings = select(checkpoints.c.id).where(
        checkpoints.c.kind == "closing", checkpoints.c.proven_at.is_not(None), checkpoints.c.id <= at.closing
    )
    return [at.id, *connection.execute(closings).scalars()]
