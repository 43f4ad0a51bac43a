"""The check goes on from its last checkpoint in short steps, while others settle, and forgets nothing that it found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import checkpoints, dialects
from serve_app.accounting.database import revisions
from serve_app.contracts.books import Outcome
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import Conflict, InvalidValue, LedgerUnavailable, SchemaMismatch

from .books import COST, Books, Clock, Ledger

STEP = CheckBooks(seconds=0.0)  # one step a time


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "_ROWS_AT_ONCE", {"sqlite": 10, "postgresql": 10})
    monkeypatch.setattr(checkpoints, "ACCOUNTS", 2)


@contextlib.contextmanager
def shell(url: str) -> Iterator[sa.Connection]:
    """A connection past the triggers; its changes are committed."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        if url.startswith("sqlite"):
            triggers = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")).all()
            for name, _ in triggers:
                connection.execute(sa.text(f"DROP TRIGGER {name}"))
            yield connection
            for _, statement in triggers:
                connection.exec_driver_sql(statement)
        else:
            connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
            yield connection
    engine.dispose()


def settle(books: Books, *numbers: int) -> None:
    """Every third is free."""
    made = [
        books.settlement(f"r{number}", outcome=Outcome.COMPLETED if number % 3 else Outcome.FAILED)
        for number in numbers
    ]
    books.ledger.settle(made)


def test_a_check_reads_only_what_came_after_the_last_one(books: Books, url: str) -> None:
    settle(books, *range(50))
    first = books.ledger.check(full=False)
    assert (first.ok, first.entries, first.usage_rows) == (True, 34, 50)
    read: list[Any] = []
    compare = checkpoints.compare_part
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "compare_part", lambda c, part: read.append(part) or compare(c, part))
        assert books.ledger.check(full=False).ok
        assert read == []
        settle(books, *range(50, 53))
        again = books.ledger.check(full=False)
    assert (again.ok, again.entries, again.usage_rows) == (True, 36, 53)
    assert [(part.after_entry, part.entry) for part in read] == [(34, 36)]


@pytest.mark.parametrize("full", [False, True])
def test_the_books_agree_in_every_step_while_others_settle(books: Books, full: bool) -> None:
    others = [Books(books.ledger, name=f"other {number}") for number in range(5)]
    books.ledger.credit(books.account_id, 10 * COST, "grant")
    books.ledger.update_key(books.key_id, budget=10**9, budget_period="day")
    settle(books, *range(40))
    wanted, steps, done = replace(STEP, full=full), 0, [0.0]
    while True:
        report = books.ledger.run(wanted)
        assert report.differences == ()
        done.append(report.done)
        if report.next is None:
            break
        steps += 1
        assert steps < 50
        settle([books, *others][steps % 6], *range(1000 + 3 * steps, 1003 + 3 * steps))
        books.ledger.credit(others[0].account_id, 5, "grant")
        wanted = replace(STEP, after=report.next)
    assert report.ok
    assert steps > 6
    assert sorted(done) == done
    assert done[-1] == 1.0


def test_a_check_that_is_cut_off_leaves_nothing_behind_and_the_next_one_goes_on(books: Books, url: str) -> None:
    settle(books, *range(50))
    cut = books.ledger.run(STEP)
    assert cut.next is not None
    assert not cut.ok
    with Ledger(url) as later:
        proven = later.run(STEP).entries
        assert proven > cut.entries > 0
        assert later.check(full=False).entries == 34
    if url.startswith("postgresql"):
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL"
            )
            assert connection.execute(sa.text(f"{query} AND pid <> pg_backend_pid()")).scalar_one() == 0
        engine.dispose()


def test_a_difference_before_the_checkpoint_stays_until_a_full_check_finds_it_gone(books: Books, url: str) -> None:
    settle(books, *range(9))
    with shell(url) as connection:
        connection.execute(sa.text("UPDATE postings SET amount = amount + 1 WHERE entry_id = 3 AND line = 2"))
    for _ in range(2):
        assert [one.kind for one in books.ledger.check(full=False).differences] == ["entry", "usage"][:1]
    with shell(url) as connection:
        connection.execute(sa.text("UPDATE postings SET amount = amount - 1 WHERE entry_id = 3 AND line = 2"))
    assert not books.ledger.check(full=False).ok
    assert books.ledger.check(full=True).ok
    assert books.ledger.check(full=False).ok


def test_only_a_full_check_reads_again_what_was_proven(books: Books, url: str) -> None:
    settle(books, *range(9))
    assert books.ledger.check(full=False).ok
    with shell(url) as connection:
        connection.execute(sa.text("UPDATE usage SET completion_tokens = 5 WHERE request_id = 'r1'"))
    assert books.ledger.check(full=False).ok
    assert {one.kind for one in books.ledger.check(full=True).differences} == {"usage", "aggregate"}


def test_what_is_kept_is_compared_in_every_check(books: Books, url: str) -> None:
    others = [Books(books.ledger, name=f"other {number}") for number in range(2)]
    settle(books, *range(9))
    assert books.ledger.check(full=False).ok
    for account_id in (books.account_id, *(one.account_id for one in others)):
        with shell(url) as connection:
            connection.execute(sa.text(f"UPDATE accounts SET topped_up = topped_up + 1 WHERE id = '{account_id}'"))
        (found,) = books.ledger.check(full=False).differences
        assert found.subject == f"customer:{account_id}:topped_up"
        with shell(url) as connection:
            connection.execute(sa.text(f"UPDATE accounts SET topped_up = topped_up - 1 WHERE id = '{account_id}'"))
    with shell(url) as connection:
        connection.execute(sa.text("UPDATE usage_daily SET requests = requests + 1"))
    assert [one.kind for one in books.ledger.check(full=False).differences] == ["aggregate"]


def test_checks_at_the_same_time_do_not_disturb_each_other(books: Books) -> None:
    settle(books, *range(60))
    wanted = [STEP, replace(STEP, full=True), STEP]
    open_checks = list(range(3))
    while open_checks:
        for number in list(open_checks):
            try:
                report = books.ledger.run(wanted[number])
            except Conflict:  # the full check has come to its end first and replaced the others' checkpoint
                assert number != 1
                open_checks.remove(number)
                continue
            assert report.differences == ()
            if report.next is None:
                assert (report.entries, report.usage_rows) == (41, 60)
                open_checks.remove(number)
            else:
                wanted[number] = replace(STEP, after=report.next)
    again = books.ledger.check(full=False)
    assert (again.ok, again.entries, again.usage_rows) == (True, 41, 60)


def test_a_full_check_that_was_given_up_is_removed_later(timed: Books, clock: Clock, url: str) -> None:
    timed.ledger.credit(timed.account_id, 10**6)
    settle(timed, *range(60))
    cut = timed.ledger.run(replace(STEP, full=True))
    clock.now += checkpoints.ABANDONED_S + 1
    assert timed.ledger.check(full=True).ok
    with pytest.raises(Conflict, match="begin again"):
        timed.ledger.run(replace(STEP, after=cut.next))
    with shell(url) as connection:
        assert connection.execute(sa.text("SELECT kind FROM checkpoints")).scalars().all() == ["last"]
    for wrong in ("", "x", "1:2:3", "a:b:c:d:e"):
        with pytest.raises(InvalidValue, match="invalid `after`"):
            timed.ledger.run(replace(STEP, after=wrong))


def test_a_check_from_outside_does_not_migrate(new_url: Callable[..., str], next_release: Callable[[], None]) -> None:
    if (url := new_url()).startswith("sqlite"):
        with pytest.raises(LedgerUnavailable, match="no ledger"):
            Ledger(url, migrate=False)
    url = new_url(migrated=True)
    with Ledger(url, migrate=False) as ledger:
        assert ledger.check().ok
    present = revisions()[-1]
    next_release()
    with pytest.raises(SchemaMismatch, match=f"'{present}'"):
        Ledger(url, migrate=False)
