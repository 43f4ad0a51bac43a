"""The check finds what was changed behind the ledger's back, and the database refuses to change what is append-only."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from serve_app.ledger import Ledger, LedgerUnavailable, Outcome

from .books import Books

APPEND_ONLY = ("price_versions", "journal_entries", "postings", "usage")


def execute(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def sabotage(url: str, *statements: str) -> None:
    """What someone with a database shell and bad luck could do."""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            names = connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).scalars().all()
        engine.dispose()
        execute(url, *(f"DROP TRIGGER {name}" for name in names), *statements)
    else:
        execute(url, "SET session_replication_role = replica", *statements)


@pytest.fixture
def used(books: Books) -> Books:
    books.ledger.credit(books.account_id, 50, "grant")
    books.ledger.settle([books.settlement(f"r{number}") for number in range(5)])
    books.ledger.settle([books.settlement("free", outcome=Outcome.FAILED)])
    assert books.ledger.check().differences == ()
    return books


def test_an_untouched_ledger_is_in_order(used: Books) -> None:
    report = used.ledger.check()
    assert report.ok
    assert (report.accounts, report.entries, report.usage_rows) == (1, 7, 6)


@pytest.mark.parametrize(
    ("statement", "kind", "named"),
    [
        ("UPDATE postings SET amount = amount + 1 WHERE entry_id = 3 AND line = 1", "entry", "3"),
        ("DELETE FROM postings WHERE entry_id = 3 AND line = 1", "entry", "3"),
        ("DELETE FROM postings WHERE entry_id = 3", "entry", "3"),
        ("UPDATE postings SET amount = 2 * amount WHERE entry_id = 3", "balance", "{account}"),
        ("UPDATE accounts SET topped_up = topped_up + 1", "balance", "customer:{account}:topped_up"),
        ("UPDATE accounts SET granted = 7", "balance", "customer:{account}:granted"),
        ("UPDATE usage_daily SET requests = requests + 1", "aggregate", "{account}"),
        ("UPDATE usage_daily SET charged = charged - 1", "aggregate", "{account}"),
        ("DELETE FROM usage_daily", "aggregate", "{account}"),
        ("UPDATE usage SET completion_tokens = 5 WHERE request_id = 'r1'", "aggregate", "{account}"),
        ("UPDATE usage SET completion_tokens = 5 WHERE request_id = 'r1'", "usage", "r1"),
        ("UPDATE usage SET charged = 5 WHERE request_id = 'r1'", "usage", "r1"),
        ("UPDATE usage SET entry_id = NULL WHERE request_id = 'r1'", "usage", "r1"),
        ("UPDATE usage SET entry_id = 1 WHERE request_id = 'r1'", "usage", "entry 1"),
        ("UPDATE usage SET entry_id = 1 WHERE request_id = 'free'", "usage", "entry 1"),
        ("DELETE FROM usage WHERE request_id = 'r1'", "usage", "entry 4"),
        ("UPDATE price_versions SET output = output + 1", "usage", "r1"),
        ("DELETE FROM journal_entries WHERE id = 3", "journal", "7 entries were written, 6 are there"),
        ("UPDATE journal_entries SET kind = 'grant' WHERE id = 4", "usage", "entry 4"),
        ("UPDATE accounts SET version = 1000", "version", "{account}"),
        ("UPDATE api_keys SET version = 1000", "version", "{key}"),
        ("UPDATE ledger_head SET entry = entry + 1", "journal", "8 entries were written, 7 are there"),
    ],
)
def test_what_was_changed_behind_its_back_is_found(
    used: Books, url: str, statement: str, kind: str, named: str
) -> None:
    sabotage(url, statement)
    report = used.ledger.check()
    assert not report.ok
    named = named.format(account=used.account_id, key=used.key_id)
    assert [one for one in report.differences if one.kind == kind and named in f"{one.subject} {one.message}"]


@pytest.mark.parametrize("table", APPEND_ONLY)
def test_the_database_refuses_to_change_what_is_append_only(used: Books, url: str, table: str) -> None:
    column = {"price_versions": "output", "journal_entries": "memo", "postings": "amount", "usage": "charged"}[table]
    for statement in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            execute(url, statement)
    if url.startswith("postgresql"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            execute(url, f"TRUNCATE {table} CASCADE")
    assert used.ledger.check().ok


@pytest.mark.parametrize("bucket", ["granted", "topped_up"])
def test_the_database_refuses_a_negative_balance(used: Books, url: str, bucket: str) -> None:
    with pytest.raises(sa.exc.IntegrityError, match="not_negative"):
        execute(url, f"UPDATE accounts SET {bucket} = -1")


def test_a_damaged_ledger_answers_unavailable_and_not_nonsense(ledger: Ledger, url: str) -> None:
    execute(url, "DROP TABLE usage_daily")
    with pytest.raises(LedgerUnavailable):
        ledger.usage()
