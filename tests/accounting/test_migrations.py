"""The migrations lead to the schema in `schema.py`, keep the books, and let two releases share a ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from serve_app.accounting.database import revisions
from serve_app.accounting.schema import metadata
from serve_app.contracts.books import Audit, Settled
from serve_app.contracts.errors import LedgerUnavailable, SchemaMismatch

from .books import COST, NOON, Books, Ledger, patient_database


def schema(url: str) -> dict[str, Any]:
    """Columns, keys, checks and indexes as the database reports them."""
    engine = sa.create_engine(url)
    inspector = sa.inspect(engine)
    found = {}
    for table in sorted(set(inspector.get_table_names()) - {"alembic_version"}):
        found[table] = {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)
            },
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(inspector.get_foreign_keys(table), key=str),
            "unique": sorted(inspector.get_unique_constraints(table), key=str),
            "checks": sorted((one["name"], one["sqltext"]) for one in inspector.get_check_constraints(table)),
            "indexes": sorted(
                (
                    index | {"dialect_options": {key: str(value) for key, value in index["dialect_options"].items()}}
                    for index in inspector.get_indexes(table)
                ),
                key=str,
            ),
        }
    engine.dispose()
    return found


_schemas: dict[str, dict[str, Any]] = {}


def schema_of_a_new_ledger(new_url: Callable[..., str]) -> dict[str, Any]:
    url = new_url(migrated=True)
    name = sa.make_url(url).get_backend_name()
    if name not in _schemas:
        _schemas[name] = schema(url)
    return _schemas[name]


def test_the_migrated_schema_equals_the_metadata(new_url: Callable[..., str]) -> None:
    migrated, created = new_url(migrated=True), new_url()
    engine = sa.create_engine(migrated)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()

    # Alembic does not compare checks and names.
    engine = sa.create_engine(created)
    metadata.create_all(engine)
    engine.dispose()
    assert schema_of_a_new_ledger(new_url) == schema(created)


def test_the_next_release_keeps_the_books(new_url: Callable[..., str], next_release: Callable[[], None]) -> None:
    url = new_url(migrated=True, own=True)
    with Ledger(url, now=lambda: NOON) as ledger:
        books = Books(ledger, top_up=10 * COST)
        ledger.settle([books.settlement("before")])
    next_release()
    with Ledger(url, now=lambda: NOON) as ledger:
        [again, after] = ledger.settle([books.settlement("before"), books.settlement("after")])
        assert isinstance(again, Settled)
        assert isinstance(after, Settled)
        assert (again.duplicate, after.duplicate) == (True, False)
        assert ledger.get_account(books.account_id).balance == 8 * COST
        assert ledger.check().ok
    assert "later" in schema(url)


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("UPDATE journal_entries SET memo = 'x'", "append-only"),
        ("DELETE FROM journal_entries", "append-only"),
        ("UPDATE audit_log SET actor = 'x'", "append-only"),
        ("INSERT INTO journal_entries VALUES (10, 'gift', 'acct_ada', '', 0, NULL)", "kind"),
        ("INSERT INTO journal_entries VALUES (10, 'grant', 'acct_none', '', 0, NULL)", "(?i)foreign key"),
        ("INSERT INTO postings VALUES (77, 1, 'x', 1)", "(?i)foreign key"),
        ("UPDATE grants SET remaining = -1", "remaining_within_amount"),
    ],
)
def test_the_database_guards_the_books(books: Books, statement: str, refused: str) -> None:
    books.ledger.credit(books.account_id, 5, "grant", audit=Audit("operator"))
    with (
        pytest.raises(sa.exc.DBAPIError, match=refused),
        books.ledger._database.engine.begin() as connection,
    ):
        connection.execute(sa.text(statement))


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(
    new_url: Callable[..., str], next_release: Callable[[], None]
) -> None:
    url = new_url(migrated=True, own=True)
    with Ledger(url) as ledger:
        books = Books(ledger)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE later (somebody_elses TEXT)"))
    before = schema(url)
    next_release()
    with pytest.raises((LedgerUnavailable, sa.exc.DBAPIError)):
        Ledger(url)
    assert schema(url) == before
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE later"))
    engine.dispose()
    with Ledger(url) as ledger:
        assert ledger.get_account(books.account_id).account_id == books.account_id
        assert ledger.check().ok


def test_processes_that_start_together_migrate_once(new_url: Callable[..., str]) -> None:
    url = new_url()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Ledger(url).close(), range(4)))
    assert schema(url) == schema_of_a_new_ledger(new_url)


def test_a_migration_lets_a_writer_that_has_begun_end_first(
    new_url: Callable[..., str], next_release: Callable[[], None]
) -> None:
    """A writer of the previous release has a key and comes to its account when the migration has begun."""
    if (url := new_url(migrated=True, own=True)).startswith("sqlite"):
        pytest.skip("SQLite locks no tables: one writer has the whole file")
    with Ledger(url) as ledger:
        Books(ledger)
    old, new = (patient_database(url) for _ in range(2))
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    next_release()
    with ThreadPoolExecutor(1) as pool:
        with old.transaction() as transaction:
            transaction.connection.execute(sa.text("UPDATE api_keys SET name = 'seen'"))
            migrated = pool.submit(new.migrate)
            with new.engine.connect() as watching:
                while not watching.execute(waiting).scalar_one():
                    assert not migrated.done(), migrated.result()
                    watching.rollback()  # the view keeps what it has shown until its transaction ends
                    time.sleep(0.01)
            transaction.connection.execute(sa.text("UPDATE accounts SET active = active"))
        migrated.result(120)
    with old.engine.connect() as connection:
        assert set(connection.execute(sa.text("SELECT name FROM api_keys")).scalars()) == {"seen"}
        assert MigrationContext.configure(connection).get_current_revision() == "next"
    old.close()
    new.close()


def newer_release(url: str, runs_from: str) -> None:
    """Migrates as the next release may: adds a table, an index, and columns that older code does not write."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE later (id INTEGER PRIMARY KEY, account_id TEXT)"))
        for table in ("accounts", "api_keys", "usage", "journal_entries", "ledger_head"):
            connection.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN later TEXT"))
            connection.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN later_count INTEGER NOT NULL DEFAULT 0"))
        connection.execute(sa.text("CREATE INDEX ix_later ON usage (later)"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("UPDATE ledger_head SET runs_from = :runs_from"), {"runs_from": runs_from})
    engine.dispose()


def test_a_release_runs_on_the_schema_of_the_next_one(new_url: Callable[..., str]) -> None:
    url = new_url(migrated=True, own=True)
    with Ledger(url, now=lambda: NOON) as before:
        books = Books(before, top_up=10 * COST)
        newer_release(url, runs_from=revisions()[-1])
        before.settle([books.settlement("while it ran")])
    with Ledger(url, now=lambda: NOON) as ledger:
        ledger.settle([books.settlement("after a restart")])
        ledger.credit(books.account_id, 7)
        assert ledger.get_account(books.account_id).balance == 8 * COST + 7
        assert ledger.check().ok
        assert {row.request_id for row in ledger.export_usage().rows} == {"while it ran", "after a restart"}
    Ledger(url, migrate=False).close()


def test_a_ledger_that_a_newer_release_has_contracted_is_left_alone(new_url: Callable[..., str]) -> None:
    url = new_url(migrated=True, own=True)
    newer_release(url, runs_from="9999")
    before = schema(url)
    for migrate in (True, False):
        with pytest.raises(SchemaMismatch, match="9999"):
            Ledger(url, migrate=migrate)
    assert schema(url) == before
