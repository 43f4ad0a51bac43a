"""The migrations lead to the schema in `schema.py`, from every revision on, with the rows intact."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from serve_app.ledger import Ledger, SchemaMismatch, migrate
from serve_app.ledger.database import Database, revisions
from serve_app.ledger.schema import metadata

from .books import Books

REVISIONS = revisions()


def schema(url: str) -> dict[str, Any]:
    """Columns, keys, checks and indexes as the database tells them."""
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
            "indexes": sorted(inspector.get_indexes(table), key=str),
        }
    engine.dispose()
    return found


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
    assert schema(migrated) == schema(created)


def test_each_revision_upgrades_to_the_next_one(new_url: Callable[..., str]) -> None:
    url = new_url()
    database = Database(url)
    for revision in REVISIONS:
        database.migrate(revision)
        with database.engine.connect() as connection:
            assert MigrationContext.configure(connection).get_current_revision() == revision
    database.close()
    assert schema(url) == schema(new_url(migrated=True))


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_ledger_at_an_old_revision_keeps_its_rows(new_url: Callable[..., str], revision: str) -> None:
    url = new_url()
    database = Database(url)
    database.migrate(revision)
    database.close()
    with Ledger(url, migrate=False) as old:  # the releases so far differ in triggers only
        books = Books(old)
        old.settle([books.settlement("r1")])
        before = old.changes(0), old.usage(group_by=["day", "key"])
    migrate(url)
    with Ledger(url, migrate=False) as new:
        assert (new.changes(0), new.usage(group_by=["day", "key"])) == before
        assert new.check().ok


def test_processes_that_start_together_migrate_once(new_url: Callable[..., str]) -> None:
    url = new_url()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: migrate(url), range(4)))
    assert schema(url) == schema(new_url(migrated=True))


def test_a_ledger_of_a_newer_release_is_left_alone(new_url: Callable[..., str]) -> None:
    url = new_url()
    migrate(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(SchemaMismatch, match="9999"):
        Ledger(url)
