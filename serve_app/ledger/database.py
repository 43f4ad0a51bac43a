"""Engines, transactions and migrations: the only place that knows which database is underneath.

Both databases see the same discipline: one writer at a time, readers on a snapshot, a commit is on disk when it
returns. SQLite gets it from BEGIN IMMEDIATE, WAL and synchronous=FULL; PostgreSQL from a lock on the ledger's head
row and REPEATABLE READ for readers.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.script
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, bindparam, create_engine, event, select, text, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from serve_app.ledger.errors import InvalidValue, LedgerUnavailable, SchemaMismatch
from serve_app.ledger.schema import head

_MIGRATIONS = Path(__file__).parent / "migrations"
_LAST = select(head.c.version, head.c.entry, head.c.audit).with_for_update()
_SET_LAST = update(head).values(
    version=bindparam("given_version"), entry=bindparam("given_entry"), audit=bindparam("given_audit")
)
_MIGRATION_LOCK = 0x6C6564676572  # "ledger": the PostgreSQL advisory lock that lets one process migrate


@dataclass(slots=True)
class Transaction:
    """An open write transaction, which holds the ledger's head: it alone hands out versions and numbers."""

    connection: Connection
    version: int
    entry: int
    audit: int

    def next_version(self) -> int:
        """The version of the next change of an account or key."""
        self.version += 1
        return self.version

    def next_entry(self) -> int:
        """The number of the next journal entry."""
        self.entry += 1
        return self.entry

    def next_audit(self) -> int:
        """The number of the next record of the audit log."""
        self.audit += 1
        return self.audit


class Database:
    """A ledger database: `sqlite:////path/ledger.db` or `postgresql+psycopg://…`. Threads may share it.

    `wait_s` bounds the wait for another writer. Raises InvalidValue for other databases and for SQLite in memory,
    which would forget the money.
    """

    def __init__(self, url: str | URL, *, wait_s: float = 10.0) -> None:
        self.engine = _engine(_url(url), wait_s)
        sqlite = self.engine.dialect.name == "sqlite"
        self._writes = self.engine.execution_options(ledger_writes=True)
        self._reads = self.engine if sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        # SQLite's writers poll for its lock; threads of one process rather queue here.
        self._turn: contextlib.AbstractContextManager[Any] = threading.Lock() if sqlite else contextlib.nullcontext()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent snapshot. Raises LedgerUnavailable when the database does not answer."""
        with _availability(), self._reads.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """The turn to write; committed at the end, rolled back by an exception.

        Raises LedgerUnavailable when the database does not answer. If that happens to the commit itself, nobody knows
        whether it took place, so everything that writes is repeatable by an id.
        """
        with _availability(), self._turn, self._writes.begin() as connection:
            last = connection.execute(_LAST).one()
            transaction = Transaction(connection, last.version, last.entry, last.audit)
            yield transaction
            given = (transaction.version, transaction.entry, transaction.audit)
            if given != tuple(last):
                connection.execute(
                    _SET_LAST, dict(zip(("given_version", "given_entry", "given_audit"), given, strict=True))
                )

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema up to this release; harmless when it is, also while other processes do the same.

        Raises SchemaMismatch when a newer release has migrated the database, LedgerUnavailable when it doesn't answer.
        """
        with self.read() as connection:
            if MigrationContext.configure(connection).get_current_revision() == revisions()[-1]:
                return
        sqlite = self.engine.dialect.name == "sqlite"
        try:
            with _availability(), self._writes.execution_options(ledger_migrates=True).begin() as connection:
                self._upgrade(connection, revision)
        finally:
            if sqlite:
                self.engine.dispose()  # that connection does not watch foreign keys

    def _upgrade(self, connection: Connection, revision: str) -> None:
        sqlite = connection.dialect.name == "sqlite"
        if not sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        if current is not None and current not in revisions():
            raise SchemaMismatch(
                f"the ledger's schema is at revision {current!r}, which this release does not know: "
                "run the newer release that migrated it"
            )
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, revision)
        if sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
            raise AssertionError(f"the migration would leave a row that refers to nothing: {tuple(broken)}")

    def close(self) -> None:
        """Close the pooled connections."""
        self.engine.dispose()


def migrate(url: str | URL) -> None:
    """Create or upgrade the ledger's schema. Raises SchemaMismatch, LedgerUnavailable, InvalidValue."""
    database = Database(url)
    try:
        database.migrate()
    finally:
        database.close()


@functools.cache
def revisions() -> tuple[str, ...]:
    """The revisions that this release knows, oldest first."""
    scripts = alembic.script.ScriptDirectory.from_config(migration_config()).walk_revisions()
    return tuple(script.revision for script in scripts)[::-1]


def migration_config() -> alembic.config.Config:
    """Alembic's configuration, without a file of its own."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _url(url: str | URL) -> URL:
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise InvalidValue(f"no ledger on {backend!r}: use sqlite:////path/ledger.db or postgresql+psycopg://…")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidValue("a ledger in memory would forget the money: use a file, sqlite:////path/ledger.db")
    return parsed


def _engine(url: URL, wait_s: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": wait_s})
        event.listen(engine, "connect", functools.partial(_configure_sqlite, wait_s=wait_s))
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": max(2, round(wait_s))})

    def configure(connection: Any, _record: Any) -> None:
        # A writer whose machine vanishes must not keep the head row, and with it everybody, for hours.
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {round(wait_s * 1000)}")
            cursor.execute("SET idle_in_transaction_session_timeout = 30000")
        connection.commit()

    event.listen(engine, "connect", configure)
    return engine


def _configure_sqlite(connection: Any, _record: Any, *, wait_s: float) -> None:
    # The sqlite3 module would begin transactions by itself, deferred and only before some statements.
    connection.isolation_level = None
    cursor = connection.cursor()
    mode = _switch_to_wal(cursor, wait_s)
    if mode != "wal":
        raise InvalidValue(f"SQLite cannot use WAL here (it answered {mode!r}): keep the ledger on a local disk")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _switch_to_wal(cursor: Any, wait_s: float) -> str:
    """The journal mode after asking for WAL; the first connections to a new file may ask at the same time."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            (mode,) = cursor.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError:
            # The one statement for which SQLite does not wait for others by itself.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads and then writes can fail at once, whatever the timeout.
    options = connection.get_execution_options()
    writes = options.get("ledger_writes", False)
    if options.get("ledger_migrates", False):
        # To write a table anew, SQLite wants foreign keys off, which it takes only outside of a transaction.
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def _availability() -> Iterator[None]:
    try:
        yield
    except (IntegrityError, DataError):
        raise  # what was asked is at fault, not the database
    except (DBAPIError, PoolTimeout) as error:
        cause = getattr(error, "orig", None) or error
        raise LedgerUnavailable(f"the ledger's database did not answer ({cause}): repeat with the same id") from error
