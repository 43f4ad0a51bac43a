"""The migrations lead to the schema in `schema.py`, from every revision on, with the rows intact."""

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
from serve_app.contracts.books import Settled
from serve_app.contracts.errors import LedgerUnavailable, SchemaMismatch

from . import first_release
from .books import COST, NOON, Books, Ledger, patient_database

REVISIONS = revisions()


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


def test_a_ledger_of_the_first_release_keeps_its_books_at_each_revision(new_url: Callable[..., str]) -> None:
    """It is upgraded from one revision to the next, and then used."""
    url = new_url()
    database = patient_database(url)
    database.migrate("0001")
    first_release.fill(database)
    for revision in REVISIONS:
        database.migrate(revision)
        with database.engine.connect() as connection:
            assert MigrationContext.configure(connection).get_current_revision() == revision
        assert first_release.read(database) == first_release.ROWS, revision
    database.close()
    assert schema(url) == schema_of_a_new_ledger(new_url)

    with Ledger(url, now=lambda: NOON) as ledger:
        report = ledger.check()
        assert report.differences == ()
        assert (report.accounts, report.entries, report.usage_rows) == (2, 9, 5)
        ada, bob = ledger.list_accounts()
        assert (ada.account_id, ada.granted, ada.topped_up, ada.version) == ("acct_ada", 58, 995, 8)
        assert (ada.limits, ada.expiring, ada.available(1e12)) == ({"rpm": 7}, (), 1053)
        assert (bob.balance, bob.active) == (0, False)
        # The older grant was spent first.
        assert [(one.amount, one.left, one.expires_at) for one in ledger.grants("acct_ada")] == [
            (100, 8, None),
            (50, 50, None),
        ]
        assert ledger.grants("acct_bob") == []
        key, gone = ledger.list_keys("acct_ada")[0], ledger.list_keys("acct_bob")[0]
        assert (key.active, key.models, key.budget, key.expires_at) == (True, None, None, None)
        assert (gone.active, gone.revoked_at) == (False, NOON - 10)
        assert [one.request_id for one in ledger.export_usage().rows] == ["r1", "r2", "r5", "r3", "r4"]
        assert ledger.audit_log() == []

        # Earlier settlements stay settled, and the ledger continues from there.
        again = Books.of(ledger, "acct_ada", "key_ada")
        (settled,) = ledger.settle([again.settlement("r1")])
        assert isinstance(settled, Settled)
        assert (settled.duplicate, settled.charged, settled.balance) == (True, COST, 1053)
        assert ledger.credit("acct_ada", 1000, idempotency_key="payment-1") == ada
        ledger.credit("acct_ada", 30, "grant", expires_at=NOON + 60)
        ledger.settle([again.settlement("r6")])
        assert [one.left for one in ledger.grants("acct_ada")] == [0, 42, 0]
        assert ledger.update_key("key_ada", budget=1000, budget_period="day").spent == 3 * COST
        assert ledger.check().ok


def test_an_upgraded_ledger_is_as_well_guarded_as_a_new_one(upgraded_url: str) -> None:
    database = patient_database(upgraded_url)
    for statement, refused in [
        ("UPDATE journal_entries SET memo = 'x'", "append-only"),
        ("DELETE FROM journal_entries", "append-only"),
        ("UPDATE audit_log SET actor = 'x'", "append-only"),
        ("INSERT INTO journal_entries VALUES (10, 'gift', 'acct_ada', '', 0, NULL)", "kind"),
        ("INSERT INTO journal_entries VALUES (10, 'grant', 'acct_none', '', 0, NULL)", "(?i)foreign key"),
        ("INSERT INTO postings VALUES (77, 1, 'x', 1)", "(?i)foreign key"),
        ("UPDATE grants SET remaining = -1", "remaining_within_amount"),
    ]:
        if "UPDATE audit_log" in statement and upgraded_url.startswith("sqlite"):
            continue  # SQLite's triggers fire for each row, and there is none
        with pytest.raises(sa.exc.DBAPIError, match=refused), database.engine.begin() as connection:
            connection.execute(sa.text(statement))
    database.close()


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(new_url: Callable[..., str]) -> None:
    url = new_url()
    database = patient_database(url)
    database.migrate("0001")
    first_release.fill(database)
    with database.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE audit_log (somebody_elses TEXT)"))
    before = schema(url)
    with pytest.raises((LedgerUnavailable, sa.exc.DBAPIError)):
        database.migrate()
    assert schema(url) == before
    assert first_release.read(database) == first_release.ROWS
    with database.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE audit_log"))
    database.migrate()
    database.close()
    with Ledger(url) as ledger:
        assert ledger.check().ok


def test_processes_that_start_together_migrate_once(new_url: Callable[..., str]) -> None:
    url = new_url()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Ledger(url).close(), range(4)))
    assert schema(url) == schema_of_a_new_ledger(new_url)


def test_a_migration_lets_a_writer_that_has_begun_end_first(new_url: Callable[..., str]) -> None:
    """A writer of the release before has a key and comes to its account when the migration has begun."""
    if (url := new_url()).startswith("sqlite"):
        pytest.skip("SQLite locks no tables: one writer has the whole file")
    old, new = (patient_database(url) for _ in range(2))
    old.migrate("0001")
    first_release.fill(old)
    old.migrate("0012")
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
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
        assert MigrationContext.configure(connection).get_current_revision() == REVISIONS[-1]
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
        newer_release(url, runs_from=REVISIONS[-1])
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
