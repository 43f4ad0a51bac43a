"""Creates a new ledger from a backup.

A restored ledger has no revision until it is verified, and a service does not start on a ledger without one. An
interrupted restore is therefore never used. On SQLite, the file also gets its final name only after verification.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, delete, inspect, text, update
from sqlalchemy.engine import URL, make_url

from serve_app.accounting import postgres_tools
from serve_app.accounting.backup import LONGEST_S, REVISION, count_rows
from serve_app.accounting.backup_file import BackupFile, Manifest
from serve_app.accounting.checkpoints import check_books
from serve_app.accounting.console_tables import recharges
from serve_app.accounting.database import Database, revisions
from serve_app.accounting.schema import accounts, api_keys, head, limiter_holds, limiter_leases
from serve_app.contracts.books import Difference
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import Conflict, InvalidValue, LedgerError, SchemaMismatch
from serve_app.contracts.units import DAY_S
from serve_app.storage.spool_file import flush_folder

# More than the number of versions or epochs that a ledger assigns between its last backup and the day it is lost.
AHEAD: Final = 10**12
NO_RECHARGE_S: Final = DAY_S

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Restored:
    """The backup's manifest, and the differences in the books, which were already in the backup."""

    manifest: Manifest
    differences: tuple[Difference, ...]


def restore(file: Path, url: str | URL, now: float, progress: Progress) -> Restored:
    """Fills a new, empty database. After a LedgerError, no service starts on the partial restore.

    Raises InvalidValue if the file is damaged or from the other kind of database, Conflict if the database is not
    empty or does not fit the backup, and SchemaMismatch if this release does not run on the backup's schema.
    """
    target = make_url(url)
    with BackupFile(file) as backup:
        _expect_kind(backup.manifest, target)
        _expect_release(backup.manifest)
        if backup.manifest.kind == "sqlite":
            with _new_file(Path(target.database or "")) as draft:
                backup.verify(progress)
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
                    copy.writelines(backup.chunks())
                with contextlib.closing(Database(f"sqlite:///{draft}")) as database:
                    differences = _finish(database, backup.manifest, now, progress)
        else:
            with contextlib.closing(Database(target)) as database:
                _expect_empty(database, backup.manifest)
                backup.verify(progress)
                progress("filling the database")
                _load(database.engine.url, backup)
                differences = _finish(database, backup.manifest, now, progress)
        return Restored(backup.manifest, differences)


def _load(url: URL, backup: BackupFile) -> None:
    manifest = backup.manifest
    postgres_tools.load(url, manifest.server, schema=manifest.postgres_schema, chunks=backup.chunks())


def _finish(database: Database, manifest: Manifest, now: float, progress: Progress) -> tuple[Difference, ...]:
    """Verifies the restored rows, makes the ledger safe to start a service on, and sets its revision."""
    with database.snapshot(LONGEST_S) as connection:
        found = count_rows(connection)
    if found != manifest.rows:
        off = sorted(name for name in found | manifest.rows if found.get(name) != manifest.rows.get(name))
        raise LedgerError(
            f"the restored ledger does not have the same rows as the backup, in {', '.join(off)}: do not use it"
        )
    with database.restored(manifest.revision) as connection:
        _separate_from_lost_ledger(connection, now)
    differences: dict[Difference, None] = {}
    check = CheckBooks(full=True)
    while True:
        report = check_books(database, check, now)
        differences |= dict.fromkeys(report.differences)
        if report.next is None:
            break
        progress(f"{report.done:.0%} of the books checked, {len(differences)} problems")
        check = CheckBooks(full=True, after=report.next)
    last = manifest.revision if manifest.revision not in revisions() else revisions()[-1]
    with database.transaction() as transaction:
        transaction.connection.execute(text(f"INSERT INTO {REVISION} VALUES (:revision)"), {"revision": last})
    return tuple(differences)


def _separate_from_lost_ledger(connection: Connection, now: float) -> None:
    """Separates this ledger from the lost one, so that no process confuses their states.

    Versions and epochs jump far ahead, so every process that reads changes sees all accounts and keys as changed.
    No lease counts as released: if a limiter of the lost ledger still runs, its successor waits until that lease has
    expired. Holds that gateways or limiters stored in the ledger are deleted; the costs of their requests are in a
    spool, or lost. No account is recharged for a day, because payments after the backup are missing in this ledger
    until the provider reports them again.
    """
    for table in (accounts, api_keys, head):
        connection.execute(update(table).values(version=table.c.version + AHEAD))
    connection.execute(update(limiter_leases).values(epoch=limiter_leases.c.epoch + AHEAD, released=False))
    connection.execute(delete(limiter_holds))
    connection.execute(update(recharges).values(next_at=now + NO_RECHARGE_S))


def _expect_kind(manifest: Manifest, target: URL) -> None:
    kind = {"postgres": "postgresql"}.get(name := target.get_backend_name(), name)
    if kind != manifest.kind:
        raise InvalidValue(
            f"the backup is of a ledger on {manifest.kind}, the database is {kind}: choose a {manifest.kind} database"
        )


def _expect_release(manifest: Manifest) -> None:
    if manifest.revision not in revisions() and manifest.runs_from > revisions()[-1]:
        raise SchemaMismatch(
            f"the backup's schema is at revision {manifest.revision!r}, of release {manifest.release} or newer. This "
            "release does not run on it: restore it with that release"
        )


def _expect_empty(database: Database, manifest: Manifest) -> None:
    with database.snapshot() as connection:
        tables = inspect(connection).get_table_names()
        server = connection.exec_driver_sql("SHOW server_version").scalar_one()
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    if tables:
        raise Conflict(
            f"the database {database.engine.url.database} is not empty, it has {len(tables)} tables: make a new one "
            "(createdb NAME) and restore into that; if a restore into this one was interrupted, drop it first"
        )
    if postgres_tools.major(server) < postgres_tools.major(manifest.server):
        raise Conflict(f"the backup is of PostgreSQL {manifest.server}, this server is {server}: use a newer server")
    if schema != manifest.postgres_schema:
        raise Conflict(
            f"the backup's tables are in the schema {manifest.postgres_schema!r}, the database's is {schema!r}: "
            "use a database with that schema in its search_path"
        )


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yields a path for a draft of a SQLite ledger, which then gets the name `path`. Raises Conflict, InvalidValue."""
    for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite would apply an old log to the new file
        if (old := path.with_name(path.name + suffix)).exists():
            raise Conflict(f"{old} exists: move {path.name}* away, or choose a new file")
    try:
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=path.parent) as folder:
            draft = Path(folder) / "ledger.db"
            yield draft
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            os.link(draft, path)  # a rename would replace a file that another process made meanwhile
            flush_folder(path.parent)
    except FileExistsError:
        raise Conflict(f"{path} exists: move it away, or choose a new file") from None
    except OSError as error:
        raise InvalidValue(f"can't write {path}: {error.strerror or error}") from None
