"""The check goes on from its last checkpoint in short steps, while others settle, and forgets nothing that it found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import checkpoints
from serve_app.contracts.books import Outcome
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import Conflict, InvalidValue, LedgerUnavailable, SchemaMismatch

from .books import COST, NOON, Books, Clock, Ledger, patient_database

STEP = CheckBooks(seconds=0.0)  # one step a time


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "ROWS", {"sqlite": 10, "postgresql": 10})
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
        with pytest.raises(InvalidValue, match="no place"):
            timed.ledger.run(replace(STEP, after=wrong))


#: A settlement as the release before migration 0010 writes it, after those of the first release.
SETTLED_BEFORE = """
INSERT INTO journal_entries (id, kind, account_id, memo, created_at, idempotency_key)
    VALUES (10, 'charge', 'acct_ada', 'r8', 1780315205.0, NULL);
INSERT INTO postings (entry_id, line, ledger_account, amount)
    VALUES (10, 1, 'customer:acct_ada:topped_up', -46), (10, 2, 'revenue:svc-chat', 46);
INSERT INTO usage (request_id, account_id, key_id, model, backend, price_version, day, prompt_tokens, cached_tokens,
    completion_tokens, charged, uncollected, outcome, started_at, finished_at, settled_at, entry_id)
    VALUES ('r8', 'acct_ada', 'key_ada', 'svc-chat', 'smollm2', 1, '2026-06-01', 10, 2, 4, 46, 0, 'completed',
    1780315204.0, 1780315205.0, 1780315205.0, 10);
INSERT INTO usage_daily (account_id, day, key_id, model, requests, prompt_tokens, cached_tokens, completion_tokens,
    charged, uncollected) VALUES ('acct_ada', '2026-06-01', 'key_ada', 'svc-chat', 1, 10, 2, 4, 46, 0)
    ON CONFLICT (account_id, day, key_id, model) DO UPDATE SET requests = usage_daily.requests + excluded.requests,
    prompt_tokens = usage_daily.prompt_tokens + excluded.prompt_tokens,
    cached_tokens = usage_daily.cached_tokens + excluded.cached_tokens,
    completion_tokens = usage_daily.completion_tokens + excluded.completion_tokens,
    charged = usage_daily.charged + excluded.charged, uncollected = usage_daily.uncollected + excluded.uncollected;
UPDATE accounts SET granted = 58, topped_up = 949, version = 10 WHERE id = 'acct_ada';
UPDATE ledger_head SET version = 10, entry = 10, audit = 0
"""


def test_rows_of_the_release_before_are_numbered_and_checked(upgraded_url: str) -> None:
    """Also those that it writes on the new schema."""
    url, database = upgraded_url, patient_database(upgraded_url)
    old = "INSERT INTO usage ({}) SELECT {} FROM usage WHERE request_id = 'r5'"
    columns = (
        "account_id, key_id, model, backend, price_version, day, prompt_tokens, cached_tokens, completion_tokens, "
    )
    columns += "charged, uncollected, outcome, started_at, finished_at, settled_at"
    with database.engine.begin() as connection:
        connection.execute(sa.text(old.format(f"request_id, {columns}", f"'r6', {columns}")))
        tokens = "prompt_tokens = prompt_tokens + 10, cached_tokens = cached_tokens + 2"
        daily = f"UPDATE usage_daily SET requests = requests + 1, {tokens}, completion_tokens = completion_tokens + 4"
        connection.execute(sa.text(f"{daily} WHERE account_id = 'acct_ada'"))
        for statement in SETTLED_BEFORE.split(";"):
            connection.execute(sa.text(statement))
    database.close()
    with Ledger(url, now=lambda: NOON) as ledger:
        again = Books.of(ledger, "acct_ada", "key_ada")
        ledger.settle([again.settlement("r7", outcome=Outcome.FAILED)])
        report = ledger.check()
        assert (report.differences, report.usage_rows, report.entries) == ((), 8, 10)
        assert ledger.check(full=False).ok
    with shell(url) as connection:
        numbers = connection.execute(sa.text("SELECT number FROM usage WHERE entry_id IS NULL")).scalars().all()
        assert len({number for number in numbers if number is not None}) == 3


def test_a_check_from_outside_does_not_migrate(new_url: Callable[..., str]) -> None:
    url = new_url()
    database = patient_database(url)
    if url.startswith("sqlite"):
        with pytest.raises(LedgerUnavailable, match="no ledger"):
            Ledger(url, migrate=False)
    database.migrate("0007")
    database.close()
    with pytest.raises(SchemaMismatch, match="'0007'"):
        Ledger(url, migrate=False)
    with Ledger(new_url(migrated=True), migrate=False) as ledger:
        assert ledger.check().ok


def test_many_rows_without_a_number_get_it_in_short_steps(
    books: Books, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "NUMBERED", 2)
    settle(books, *range(0, 21, 3))
    with shell(url) as connection:
        connection.execute(sa.text("UPDATE usage SET number = NULL"))
    report, before = books.ledger.run(replace(STEP, full=True)), 0
    while report.next == "0:0:0:0:":
        before += 1
        assert not report.ok
        report = books.ledger.run(replace(STEP, full=True, after=report.next))
    assert before == 4
    assert books.ledger.check(full=True).usage_rows == 7
