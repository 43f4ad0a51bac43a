"""Backs up a ledger to one file, as of one moment, while the service runs.

The manifest's data about the rows comes from the same snapshot as the rows: on SQLite from the copy itself, on
PostgreSQL from the transaction whose snapshot pg_dump uses.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import Connection, func, inspect, select, table
from sqlalchemy.engine import URL

from serve_app import __version__
from serve_app.accounting import postgres_tools
from serve_app.accounting.backup_file import CHUNK, Manifest, write_copy, write_manifest
from serve_app.accounting.database import Database
from serve_app.accounting.schema import accounts, head, usage, usage_daily
from serve_app.contracts.units import DAY_S

LONGEST_S: Final = DAY_S  # maximum time that the snapshot is kept for pg_dump
PAGES: Final = 4096  # SQLite pages copied between two checks for Ctrl-C
REVISION: Final = "alembic_version"  # the table with the schema's revision

Progress = Callable[[str], None]


def back_up(database: Database, file: IO[bytes], folder: Path, progress: Progress) -> Manifest:
    """Writes a backup. If the ledger is on SQLite, `folder` needs room for a copy of it. Raises LedgerError."""
    database.expect_head()
    with zipfile.ZipFile(file, "w") as archive:
        write = _write_sqlite if database.kind == "sqlite" else _write_postgresql
        manifest = write(database, archive, folder, progress)
        write_manifest(archive, manifest)
    return manifest


def _write_sqlite(database: Database, archive: zipfile.ZipFile, folder: Path, progress: Progress) -> Manifest:
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=folder) as draft:
        path = Path(draft) / "ledger.db"
        with database.snapshot() as connection:
            connection.execute(select(head.c.id)).one()  # the snapshot begins here
            taken_at = time.time()
            _copy(connection, path, progress)
        with contextlib.closing(Database(f"sqlite:///{path}")) as copied, copied.snapshot() as connection:
            description = _describe(connection)
        progress("packing the copy")
        with path.open("rb") as copy:
            stored = write_copy(archive, "ledger.db", iter(lambda: copy.read(CHUNK), b""), packed=False)
    return Manifest(taken_at=taken_at, **description, **stored)


def _copy(connection: Connection, path: Path, progress: Progress) -> None:
    reported_at = time.monotonic()

    def copied(_status: int, left: int, total: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > 2:
            reported_at = time.monotonic()
            progress(f"{1 - left / max(1, total):.0%} copied")

    source: Any = connection.connection.driver_connection
    with contextlib.closing(sqlite3.connect(path)) as target:
        source.backup(target, pages=PAGES, progress=copied)


def _write_postgresql(database: Database, archive: zipfile.ZipFile, _folder: Path, progress: Progress) -> Manifest:
    with database.snapshot(LONGEST_S) as connection:
        snapshot = connection.exec_driver_sql("SELECT pg_export_snapshot()").scalar_one()
        taken_at = time.time()
        server = connection.exec_driver_sql("SHOW server_version").scalar_one()
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        chunks = postgres_tools.dump(database.engine.url, server, schema=schema, snapshot=snapshot)
        stored = write_copy(archive, "ledger.pgdump", _counted(chunks, progress), packed=True)
        progress("counting rows")
        description = _describe(connection)
    return Manifest(taken_at=taken_at, server=server, postgres_schema=schema, **description, **stored)


def _counted(chunks: Iterator[bytes], progress: Progress) -> Iterator[bytes]:
    read = reported = 0
    for chunk in chunks:
        yield chunk
        read += len(chunk)
        if read - reported >= 64 * CHUNK:
            reported = read
            progress(f"{read // CHUNK:,} MiB written")


def _describe(connection: Connection) -> dict[str, Any]:
    """Returns the manifest's data about the ledger as the connection sees it."""
    at = connection.execute(select(head)).one()
    last = last_settled(connection)
    return {
        "kind": connection.dialect.name,
        "release": __version__,
        "revision": connection.exec_driver_sql(f"SELECT version_num FROM {REVISION}").scalar_one(),
        "runs_from": at.runs_from,
        "rows": count_rows(connection),
        "currency": at.currency,
        "balance": int(connection.execute(select(func.sum(accounts.c.granted + accounts.c.topped_up))).scalar() or 0),
        "charged": int(connection.execute(select(func.sum(usage_daily.c.charged))).scalar() or 0),
        "last_settled": None if last is None else last[0],
        "last_settled_at": None if last is None else last[1],
    }


def count_rows(connection: Connection) -> dict[str, int]:
    """Returns the number of rows by table, without the revision table."""
    names = sorted(set(inspect(connection).get_table_names()) - {REVISION})
    return {name: connection.execute(select(func.count()).select_from(table(name))).scalar_one() for name in names}


def last_settled(connection: Connection) -> tuple[str, float] | None:
    """Returns the last settled request and its time. Reads only the ends of two indexes."""
    columns = (usage.c.request_id, usage.c.settled_at)
    found = [
        connection.execute(select(*columns).where(number.is_not(None)).order_by(number.desc()).limit(1)).one_or_none()
        for number in (usage.c.entry_id, usage.c.number)
    ]
    rows = [(str(row.request_id), float(row.settled_at)) for row in found if row is not None]
    return max(rows, key=lambda row: row[1], default=None)


def shown(url: URL) -> str:
    """Returns a database's address without its password."""
    return url.set(password=None, query={}).render_as_string()
