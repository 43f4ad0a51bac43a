"""Opens connections and transactions and migrates the schema, on SQLite and PostgreSQL. See also `dialects`.

Both databases follow the same rules: one writer at a time, readers on a snapshot, and a commit is on disk when it
returns. SQLite uses BEGIN IMMEDIATE, WAL and synchronous=FULL. PostgreSQL uses a lock on the ledger's head row, and
REPEATABLE READ for readers.

Every operation has a deadline by which it ends, with or without an answer. The server's timeouts are shorter, so
PostgreSQL ends most late operations itself. The client aborts the others (`bounded_connection`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.script
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, bindparam, create_engine, event, inspect, select, text, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from serve_app.accounting.schema import head
from serve_app.contracts.errors import InvalidValue, LedgerUnavailable, SchemaMismatch

_MIGRATIONS = Path(__file__).parent / "migrations"
_LAST = select(head.c.version, head.c.entry, head.c.audit).with_for_update()
_SET_LAST = update(head).values(
    version=bindparam("last_version"), entry=bindparam("last_entry"), audit=bindparam("last_audit")
)
_FORGET_REVISION = text("DELETE FROM alembic_version")
_MIGRATION_LOCK = 0x6C6564676572  # "ledger": the PostgreSQL advisory lock under which one process migrates
_MIGRATION_S = 3600.0

# A deferred transaction that reads and then writes can fail at once, despite the timeout.
_WRITE = "BEGIN IMMEDIATE"
# SQLite can rewrite a table only with foreign keys off, and cannot turn them off inside a transaction.
_MIGRATE = ("PRAGMA foreign_keys = OFF", _WRITE)

#: Deadline of this thread's operation, in seconds of the monotonic clock.
_ends_at: ContextVar[float] = ContextVar("_ends_at", default=math.inf)


@dataclass(slots=True)
class Transaction:
    """An open write transaction. It holds the writer lock, so no other transaction assigns versions or numbers."""

    connection: Connection
    version: int
    entry: int
    audit: int

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def next_entry(self) -> int:
        self.entry += 1
        return self.entry

    def next_audit(self) -> int:
        self.audit += 1
        return self.audit


class Database:
    """A ledger database: `sqlite:////path/ledger.db` or `postgresql+psycopg://…`. Threads may share it.

    `wait_s` limits the wait for another writer. `timeout_s` limits a whole operation on PostgreSQL, including
    connecting. Raises InvalidValue for other databases, and for SQLite in memory, which would lose all balances.
    """

    def __init__(self, url: str | URL, *, wait_s: float = 5.0, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._under_way: dict[object, float] = {}  # deadline of each operation
        self.engine = _engine(_url(url), wait_s, timeout_s)
        is_sqlite = self.engine.dialect.name == "sqlite"
        self._reads = self.engine if is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        # SQLite's writers poll for its lock; threads of one process queue here instead.
        self._turn: contextlib.AbstractContextManager[Any] = threading.Lock() if is_sqlite else contextlib.nullcontext()

    @property
    def kind(self) -> str:
        """The kind of database: "sqlite" or "postgresql"."""
        return self.engine.dialect.name

    @contextlib.contextmanager
    def snapshot(self, timeout_s: float | None = None) -> Iterator[Connection]:
        """Opens a consistent snapshot. Raises LedgerUnavailable if the database does not answer.

        A read that may take longer than other operations passes a `timeout_s`.
        """
        with _availability(), self._bounded(timeout_s), _begun(self._reads) as connection:
            if timeout_s is not None:
                _allow(connection, timeout_s)
            yield connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Waits for its turn to write. Commits at the end, and rolls back on an exception.

        Raises LedgerUnavailable if the database does not answer. If the commit itself gets no answer, its outcome
        is unknown. Every write therefore has an id and can be repeated with it.
        """
        with _availability(), self._bounded(), self._turn, _begun(self.engine, _WRITE) as connection:
            last = connection.execute(_LAST).one()
            transaction = Transaction(connection, last.version, last.entry, last.audit)
            yield transaction
            given = {"version": transaction.version, "entry": transaction.entry, "audit": transaction.audit}
            if given != dict(last._mapping):
                connection.execute(_SET_LAST, {f"last_{name}": number for name, number in given.items()})

    @contextlib.contextmanager
    def aside(self) -> Iterator[Connection]:
        """Opens a short write transaction. Use it only for data that no settlement reads or writes.

        On PostgreSQL, it does not wait for other writers. Raises LedgerUnavailable if the database does not answer.
        """
        with _availability(), self._bounded(), self._turn, _begun(self.engine, _WRITE) as connection:
            yield connection

    def migrate(self) -> None:
        """Upgrades the schema to this release. Safe to repeat, even while other processes do the same.

        Raises SchemaMismatch if a newer release has migrated the database and this one does not run on it, and
        LedgerUnavailable if the database does not answer.
        """
        if self._fits(self._revision()):
            return
        try:
            with _availability(), self._bounded(_MIGRATION_S), _begun(self.engine, *_MIGRATE) as connection:
                _allow(connection, _MIGRATION_S)
                self._upgrade(connection)
        finally:
            if self.engine.dialect.name == "sqlite":
                self.engine.dispose()  # closes the migration's connection, which does not check foreign keys

    @contextlib.contextmanager
    def restored(self, revision: str) -> Iterator[Connection]:
        """Opens a long transaction on a restored schema, and upgrades the schema to this release.

        Also removes the schema's revision: the caller sets it once the rows are verified.

        Raises the same errors as `migrate`.
        """
        try:
            with _availability(), self._bounded(_MIGRATION_S), _begun(self.engine, *_MIGRATE) as connection:
                _allow(connection, _MIGRATION_S)
                connection.execute(_FORGET_REVISION)
                if revision in revisions()[:-1]:
                    connection.execute(text("INSERT INTO alembic_version VALUES (:named)"), {"named": revision})
                    self._upgrade(connection)
                    connection.execute(_FORGET_REVISION)
                yield connection
        finally:
            if self.engine.dialect.name == "sqlite":
                self.engine.dispose()  # as in `migrate`

    def expect_head(self) -> None:
        """Raises SchemaMismatch if this release does not run on the schema.

        Raises LedgerUnavailable if the ledger does not exist or the database does not answer.
        """
        database = self.engine.url.database
        if self.engine.dialect.name == "sqlite" and not Path(database or "").is_file():
            raise LedgerUnavailable(f"there is no ledger at {database}")
        if not self._fits(current := self._revision()):
            with self.snapshot() as connection:
                _expect_revision(connection, current)
            raise SchemaMismatch(
                f"the ledger's schema is at revision {current!r}, this release needs {revisions()[-1]!r}: use the "
                "release that the service runs, or start this one first"
            )

    def _revision(self) -> str | None:
        with self.snapshot() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def _fits(self, current: str | None) -> bool:
        """Returns whether the schema is this release's, or a newer release's on which this release also runs."""
        if current is None or current in revisions():
            return current == revisions()[-1]
        with self.snapshot() as connection:
            return bool(connection.execute(select(head.c.runs_from)).scalar_one() <= revisions()[-1])

    def _upgrade(self, connection: Connection) -> None:
        is_sqlite = connection.dialect.name == "sqlite"
        if not is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        _expect_revision(connection, current)
        if current is not None and current not in revisions():
            raise SchemaMismatch(
                f"the ledger's schema is at revision {current!r}, which this release does not know and does not run "
                "on: run the newer release that migrated it"
            )
        if current is not None and not is_sqlite:
            # Lock the head first, as every writer does, so that running writers end before tables are locked.
            # Otherwise, a writer and the migration may wait for each other.
            connection.execute(select(head.c.id).with_for_update())
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")
        if is_sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
            raise AssertionError(f"the migration would leave a foreign key that refers to no row: {tuple(broken)}")

    def overdue_s(self) -> float:
        """Seconds by which the slowest running operation is late; 0 if none is.

        Every operation has a timeout, even while the database is unavailable. An operation that stays late is
        therefore stuck in this process.
        """
        return max(0.0, time.monotonic() - min(list(self._under_way.values()), default=math.inf))

    @contextlib.contextmanager
    def _bounded(self, timeout_s: float | None = None) -> Iterator[None]:
        ends_at = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        operation, before = object(), _ends_at.set(ends_at)
        self._under_way[operation] = ends_at
        try:
            yield
        finally:
            del self._under_way[operation]
            _ends_at.reset(before)

    def close(self) -> None:
        self.engine.dispose()


@functools.cache
def revisions() -> tuple[str, ...]:
    """Returns the revisions that this release knows, oldest first."""
    scripts = alembic.script.ScriptDirectory.from_config(migration_config()).walk_revisions()
    return tuple(script.revision for script in scripts)[::-1]


def migration_config() -> alembic.config.Config:
    """Returns Alembic's configuration, without a configuration file."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _expect_revision(connection: Connection, current: str | None) -> None:
    """Raises SchemaMismatch for a ledger that has tables but no revision."""
    if current is None and inspect(connection).has_table(head.name):
        raise SchemaMismatch(
            "the ledger has tables but no revision: a restore into this database was interrupted; make a new database "
            "and restore into that"
        )


def _url(url: str | URL) -> URL:
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise InvalidValue(f"no ledger on {backend!r}: use sqlite:////path/ledger.db or postgresql+psycopg://…")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidValue("a ledger in memory would be lost at a restart: use a file, sqlite:////path/ledger.db")
    return parsed


def _engine(url: URL, wait_s: float, timeout_s: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": wait_s})
        event.listen(engine, "do_connect", _create_private)
        event.listen(engine, "connect", functools.partial(_configure_sqlite, wait_s=wait_s))
        return engine

    from serve_app.accounting import bounded_connection

    # Parameters in the URL take precedence.
    parameters = {k: v for k, v in bounded_connection.keepalives(timeout_s).items() if k not in url.query}
    bounds = {
        "lock_timeout": f"{round(wait_s * 1000)}",
        "statement_timeout": f"{round(timeout_s * 800)}",
        # A writer that vanished, or whose answer a proxy holds back, must not keep the head row locked for long.
        "idle_in_transaction_session_timeout": f"{round(timeout_s * 1000)}",
        # The server sends keepalives too, so that it ends a lost client's session. No effect on a Unix socket.
        "tcp_keepalives_idle": f"{max(1, round(timeout_s))}",
        "tcp_keepalives_interval": f"{max(1, round(0.2 * timeout_s))}",
        "tcp_keepalives_count": "3",
    }

    connector = bounded_connection.Connector(_ends_at.get, bounds)
    engine = create_engine(url, pool_pre_ping=True, pool_timeout=timeout_s, connect_args=parameters)
    event.listen(engine, "do_connect", connector.open)
    event.listen(engine, "connect", connector.prepare)
    return engine


def _allow(connection: Connection, timeout_s: float) -> None:
    """Sets longer timeouts for the transaction's statements and for the pauses between them."""
    if connection.dialect.name != "sqlite":
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.exec_driver_sql(f"SET LOCAL {name} = {round(timeout_s * 1000)}")


def _create_private(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> None:
    """Creates a missing SQLite file that only its owner can read. SQLite gives `-wal` and `-shm` the same mode."""
    if not parameters.get("uri"):
        with contextlib.suppress(OSError):  # it exists, or it cannot be created and SQLite reports why
            os.close(os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _configure_sqlite(connection: Any, _record: Any, *, wait_s: float) -> None:
    # Turn off the sqlite3 module's own transactions, which are deferred and begin only before some statements.
    connection.isolation_level = None
    cursor = connection.cursor()
    mode = _switch_to_wal(cursor, wait_s)
    if mode != "wal":
        raise InvalidValue(f"SQLite cannot use WAL here (it answered {mode!r}): keep the ledger on a local disk")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _switch_to_wal(cursor: Any, wait_s: float) -> str:
    """Requests WAL and returns the journal mode. Retries, because other connections may request it too."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            (mode,) = cursor.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError:
            # SQLite does not apply its lock timeout to this statement, so repeat it until the deadline.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def _begun(engine: Engine, *sqlite_begin: str) -> Iterator[Connection]:
    """Opens a transaction, on SQLite with the statements `sqlite_begin`, by default BEGIN.

    Not a handler of SQLAlchemy's `begin` event: one event handler on the engine slows every statement down.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            for statement in sqlite_begin or ("BEGIN",):
                connection.exec_driver_sql(statement)
        yield connection


@contextlib.contextmanager
def _availability() -> Iterator[None]:
    try:
        yield
    except (IntegrityError, DataError):
        raise  # the command caused the error, not the database
    except (DBAPIError, PoolTimeout) as error:
        cause = getattr(error, "orig", None) or error
        raise LedgerUnavailable(f"the ledger's database did not answer ({cause}): repeat with the same id") from error
