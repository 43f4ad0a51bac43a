"""The check finds changes that bypass the ledger, and the database refuses to change append-only rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting.checkpoints import check_books
from serve_app.accounting.database import Database
from serve_app.contracts.books import Audit, CheckReport, Outcome, StoredReply
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.money import Price
from serve_app.contracts.served_commands import SchedulePrice, SetTraffic

from .books import Books, Ledger, complete, patient_database

APPEND_ONLY = {"price_versions": "output", "journal_entries": "memo", "postings": "amount", "usage": "charged"}
APPEND_ONLY |= {"audit_log": "actor", "served_traffic": "weights", "served_prices": "output"}


def execute(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


@contextlib.contextmanager
def sabotaged(database: Database, statement: str) -> Iterator[CheckReport]:
    """The check's report after a change in a database shell, which is undone afterwards."""
    with database.engine.connect() as connection, connection.begin() as transaction:
        if database.engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")  # the engine begins no transaction of its own
            triggers = connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
            for name in triggers.scalars().all():
                connection.execute(sa.text(f"DROP TRIGGER {name}"))
            connection.execute(sa.text("PRAGMA defer_foreign_keys = ON"))
        else:
            connection.execute(sa.text("SET LOCAL session_replication_role = replica"))  # no triggers, no foreign keys
        for one in statement.split("; "):
            connection.execute(sa.text(one))
        same: Any = SimpleNamespace(
            snapshot=lambda: contextlib.nullcontext(connection),
            aside=lambda: contextlib.nullcontext(connection),
            transaction=lambda: contextlib.nullcontext(SimpleNamespace(connection=connection)),
        )
        yield complete(lambda wanted: check_books(same, wanted, 0.0), CheckBooks(full=True))
        transaction.rollback()


@pytest.fixture
def used(books: Books) -> Books:
    books.ledger.credit(books.account_id, 50, "grant")
    books.ledger.settle([books.settlement(f"r{number}") for number in range(5)])
    books.ledger.update_key(books.key_id, budget=10**6, budget_period="month", audit=Audit("ada"))
    books.ledger.set_limits(books.account_id, rpm=600, audit=Audit("ada"))
    books.ledger.run(SetTraffic("svc-chat", {"old": 1, "new": 1}, configured={"old": 1}))
    books.ledger.run(SchedulePrice("svc-chat", Price(1, 1, 1), is_configured=True))
    books.ledger.settle([books.settlement("free", outcome=Outcome.FAILED, reply=StoredReply("k1", "f", b"{}"))])
    assert books.ledger.check().differences == ()
    return books


def test_an_untouched_ledger_is_in_order(used: Books) -> None:
    report = used.ledger.check()
    assert report.ok
    assert (report.accounts, report.entries, report.usage_rows) == (1, 7, 6)


# statement, kind of the difference, and what its subject or message names
SABOTAGE = [
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
    ("UPDATE usage SET entry_id = NULL WHERE request_id = 'r1'", "usage", "entry 4"),
    ("UPDATE usage SET entry_id = 1 WHERE request_id = 'r1'", "usage", "entry 1"),
    ("UPDATE usage SET entry_id = 1 WHERE request_id = 'free'", "usage", "entry 1"),
    ("DELETE FROM usage WHERE request_id = 'r1'", "usage", "entry 4"),
    ("UPDATE price_versions SET output = output + 1", "usage", "r1"),
    ("DELETE FROM journal_entries WHERE id = 3", "journal", "7 entries were written, 6 exist"),
    ("UPDATE journal_entries SET kind = 'grant' WHERE id = 4", "usage", "entry 4"),
    ("UPDATE accounts SET version = 1000", "version", "{account}"),
    ("UPDATE api_keys SET version = 1000", "version", "{key}"),
    ("UPDATE ledger_head SET entry = entry + 1", "journal", "8 entries were written, 7 exist"),
    ("UPDATE grants SET amount = amount + 1", "grant", "grant 2"),
    ("UPDATE grants SET remaining = 1", "grant", "{account}"),
    ("DELETE FROM grants", "grant", "grant 2"),
    ("UPDATE journal_entries SET kind = 'top_up' WHERE kind = 'grant'", "grant", "grant 2"),
    ("UPDATE key_spend SET charged = charged + 1", "key_spend", "{key}"),
    ("UPDATE key_spend SET period = '2026-05' WHERE charged > 0", "key_spend", "{key}"),
    ("UPDATE key_spend SET period = '2026-06-01' WHERE charged > 0", "key_spend", "in periods of another length"),
    ("DELETE FROM key_spend", "key_spend", "is counted in no period"),
    ("DELETE FROM key_spend WHERE charged = 0; UPDATE usage SET day = '2026-07-01'", "key_spend", "only up to 2026-06"),
    ("UPDATE api_keys SET budget_period = NULL, budget = NULL", "key_spend", "{key} has no budget and"),
    ("DELETE FROM key_spend; DELETE FROM usage; DELETE FROM usage_daily", "key_spend", "{key} has a budget per month"),
    ("UPDATE usage SET charged = charged + 1 WHERE request_id = 'r4'", "key_spend", "{key}"),
    ("UPDATE replies SET request_id = 'none'", "reply", "none"),
    ("UPDATE replies SET account_id = 'acct_none'", "reply", "free"),
    ("DELETE FROM audit_log WHERE id = 1", "audit", "2 records were written to the audit log, 1 exist"),
    ("UPDATE audit_log SET id = 7 WHERE id = 2", "audit", "the highest number is 7"),
]


def test_the_check_finds_changes_that_bypass_the_ledger(used: Books, url: str) -> None:
    database = patient_database(url)
    for statement, kind, named in SABOTAGE:
        named = named.format(account=used.account_id, key=used.key_id)
        with sabotaged(database, statement) as report:
            assert not report.ok, statement
            found = [f"{one.subject} {one.message}" for one in report.differences if one.kind == kind]
            assert any(named in text for text in found), (statement, report.differences)
            assert not any("None" in text or "nothing" in text for text in found), (statement, found)
    database.close()
    assert used.ledger.check().ok


def test_the_database_refuses_to_change_what_is_append_only(used: Books, url: str) -> None:
    changes = ["UPDATE {0} SET {1} = {1}", "DELETE FROM {0}"]
    if url.startswith("postgresql"):
        changes.append("TRUNCATE {0} CASCADE")
    for table, column in APPEND_ONLY.items():
        for change in changes:
            with pytest.raises(sa.exc.DBAPIError, match="append-only"):
                execute(url, change.format(table, column))
    assert used.ledger.check().ok


def test_the_database_refuses_a_negative_balance(used: Books, url: str) -> None:
    for bucket in ("granted", "topped_up"):
        with pytest.raises(sa.exc.IntegrityError, match="not_negative"):
            execute(url, f"UPDATE accounts SET {bucket} = -1")


def test_a_damaged_ledger_raises_ledger_unavailable(new_url: Callable[..., str]) -> None:
    url = new_url()
    with Ledger(url) as ledger:
        execute(url, "DROP TABLE usage_daily")
        with pytest.raises(LedgerUnavailable):
            ledger.usage()
