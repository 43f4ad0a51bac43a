"""`serve-app ledger backup` and `ledger restore`: writes the ledger to one file, and restores it into a new ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.complete_file import complete_file, interruptible
from serve_app.cli.ledger import app
from serve_app.cli.output import CommandError, UsageError
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.money import format_amount
from serve_app.contracts.units import utc_text

if TYPE_CHECKING:
    from serve_app.accounting.backup_file import Manifest

_Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        "--database-url",
        metavar="URL",
        help=(
            "Database URL of the ledger. Give the password in PGPASSWORD or ~/.pgpass. The command does not use the "
            "service's URL. [SERVE_APP_DATABASE_URL, else SERVE_APP_HOME/ledger.db]"
        ),
    ),
]


@command(
    app,
    "backup",
    examples=(
        "serve-app ledger backup --to ledger-2026-11-23.backup",
        "serve-app ledger backup --to FILE --database postgresql+psycopg://ledger@db.example.com/serve_app",
    ),
)
def back_up_ledger(
    session: Session,
    to: Annotated[Path, typer.Option(metavar="FILE", help="Output file; written completely or not at all.")],
    database: _Database = None,
) -> None:
    """Write a consistent snapshot of the ledger to one file while the service runs.

    A PostgreSQL ledger requires pg_dump of the server's version or newer. The file has digests of API keys, no keys and
    no secrets. Keep SERVE_APP_SECRET_KEY separate from the file: without it, one-time codes and
    webhook signatures stop working.
    """
    with _errors():
        from serve_app.accounting.backup import back_up, shown
        from serve_app.accounting.database import Database

        url = _url(session, database)
        with closing(Database(url)) as opened, complete_file(to, "wb") as file:
            manifest = back_up(opened, file, to.parent, session.out.progress.step)
        size = to.stat().st_size
    where = shown(url)
    session.out.record(
        {"database": where, "file": str(to), "file_bytes": size, **_document(manifest)},
        [
            ("ledger", where),
            ("saved to", to.absolute()),
            ("size", f"{_rounded(size)} ({size:,} bytes)"),
            *_lines(manifest),
        ],
        note="The file has no secrets. Keep SERVE_APP_SECRET_KEY too, in another place.",
    )


@command(
    app,
    "restore",
    examples=(
        "serve-app ledger restore --from FILE --database sqlite:////path/ledger.db",
        "serve-app ledger restore --from FILE --database postgresql+psycopg://ledger@db.example.com/new_database",
    ),
)
def restore_ledger(
    session: Session,
    source: Annotated[Path, typer.Option("--from", metavar="FILE", help="File written by `ledger backup`.")],
    database: _Database = None,
) -> None:
    """Restore a backup into a new, empty database, and verify its digest, rows and books.

    Stop the service of the lost ledger first. If the books of the backup do not add up, the ledger is still restored,
    its problems are listed, and the exit code is 1.
    """
    with _errors(), interruptible():
        from serve_app.accounting.backup import shown
        from serve_app.accounting.restore import restore

        url = _url(session, database)
        restored = restore(source, url, time.time(), session.out.progress.step)
    problems = [{"kind": one.kind, "subject": one.subject, "message": one.message} for one in restored.differences]
    where, ok = shown(url), not problems
    session.out.record(
        {"database": where, "ok": ok, "problems": problems, **_document(restored.manifest)},
        [("restored into", where), *_lines(restored.manifest), ("books", "ok" if ok else f"{len(problems)} problems")],
        note="\n".join(f"{one['kind']} {one['subject']}: {one['message']}" for one in problems),
    )
    if not ok:
        raise typer.Exit(1)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise CommandError(str(error), code="ledger") from None


def _url(session: Session, named: str | None) -> Any:
    """Returns the ledger's URL: `named`, else the environment's, else that of the ledger in the state folder.

    Raises UsageError if the URL is not valid. Also raises it if the operator gave no ledger URL, but named a service
    that is not known to use the state folder. The error does not quote the URL, which may contain a password.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    from serve_app.settings import is_placeholder

    text = named or os.environ.get("SERVE_APP_DATABASE_URL", "").strip()
    if is_placeholder(text):
        raise UsageError("SERVE_APP_DATABASE_URL is still the placeholder of a template: write the database's address")
    connection = session.connection
    if not text and connection.is_named and not connection.is_of_home():
        raise UsageError(
            f"{connection.url} is not known to be the service of {connection.home.absolute()}, and this command uses "
            "the database, not the service: name the database with --database, or omit SERVE_APP_URL, PORT and --url"
        )
    try:
        return make_url(text or f"sqlite:///{connection.home.absolute() / 'ledger.db'}")
    except (ArgumentError, ValueError):
        raise UsageError(
            "the database's address must look like sqlite:////path/ledger.db or postgresql+psycopg://user@host/name"
        ) from None


def _rounded(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} KB"


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": manifest.kind,
        "taken_at": utc_text(manifest.taken_at, "milliseconds"),
        "release": manifest.release,
        "revision": manifest.revision,
        "last_settled": manifest.last_settled,
        "last_settled_at": None
        if manifest.last_settled_at is None
        else utc_text(manifest.last_settled_at, "milliseconds"),
        "currency": manifest.currency,
        "balance": format_amount(manifest.balance),
        "charged": format_amount(manifest.charged),
        "rows": manifest.rows,
        "sha256": manifest.sha256,
    }


def _lines(manifest: Manifest) -> list[tuple[str, object]]:
    document = _document(manifest)
    rows, server = manifest.rows, f"{manifest.kind} {manifest.server}".rstrip()
    last = f"{document['last_settled']} at {document['last_settled_at']}" if manifest.last_settled else None
    return [
        ("accounts", rows["accounts"]),
        ("schema", f"revision {manifest.revision}, release {manifest.release}, {server}"),
        ("as of", document["taken_at"]),
        ("last settled", last),
        ("API keys", rows["api_keys"]),
        ("requests", rows["usage"]),
        ("journal entries", rows["journal_entries"]),
        ("balances", f"{document['balance']} {document['currency'] or ''}".rstrip()),
        ("charged", f"{document['charged']} {document['currency'] or ''}".rstrip()),
    ]
