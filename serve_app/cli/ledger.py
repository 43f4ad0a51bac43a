"""`serve-app ledger …`: checks the books, archives closed months, and lists stuck settlements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError, UsageError
from serve_app.contracts.commands import MAX_RETRIED, CheckBooks
from serve_app.contracts.errors import LedgerError

if TYPE_CHECKING:
    from serve_app.accounting.database import Database

app = typer.Typer(name="ledger", help="The ledger: check, archive, stuck settlements.")

Report = dict[str, Any]
_Database = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Read this ledger directly; the service need not run."),
]


@command(
    app,
    "check",
    examples=("serve-app ledger check", "serve-app ledger check --full --database sqlite:////path/ledger.db"),
)
def check_ledger(
    session: Session,
    full: Annotated[
        bool, typer.Option("--full", help="Check from the beginning, not from the last checkpoint.")
    ] = False,
    database: _Database = None,
    archive: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Compare an archive with the ledger instead; needs --database."),
    ] = None,
) -> None:
    """Check the books for consistency. Exit code 1 if they are inconsistent.

    Every entry sums to zero. Balances and the remainders of grants equal their postings. Sums per day and the spending
    of keys against their budgets equal the requests. Charges equal counts times prices. Nothing is missing from the
    journal or the audit log. A check continues from the last checkpoint, unless you use --full.
    """
    if archive is not None:
        _verify(session, database, archive)
        return
    progress = session.out.progress.step
    if database is None:
        report = complete_check(
            lambda query: session.client.api_get("ledger", "check", query=query), progress, full=full
        )
    else:
        with _direct_steps(database) as steps:
            report = complete_check(steps, progress, full=full)
    if report["ok"]:
        if session.out.document(report, ["ok"]):
            return
        session.out.line(
            f"ok: {report['entries']:,} journal entries add up; {report['accounts']:,} accounts, "
            f"{report['usage_rows']:,} requests, grants, budgets and the audit log agree"
        )
    else:
        session.out.table(
            report,
            ("subject", "kind", "problem"),
            [(problem["subject"], problem["kind"], problem["message"]) for problem in report["problems"]],
            empty="The books do not balance, but the service reported no differences.",
        )
    if not report["ok"]:
        raise typer.Exit(1)


def complete_check(
    steps: Callable[[dict[str, str | None]], Report], progress: Callable[[str], None], *, full: bool
) -> Report:
    """Runs the steps of a check one after the other. Returns one report with the problems of all steps."""
    query: dict[str, str | None] = {"full": "true" if full else None}
    problems: list[Any] = []
    while True:
        report = steps(query)
        problems += [one for one in report["problems"] if one not in problems]
        if report.get("next") is None:
            return report | {"ok": report["ok"] and not problems, "problems": problems}
        progress(f"{report['done']:.0%} checked, {len(problems)} problems")
        query["after"] = report["next"]


@contextmanager
def _direct_steps(database: str) -> Iterator[Callable[[dict[str, str | None]], Report]]:
    """Yields a function that runs one step on the database. It returns the same report as the service.

    Raises CommandError.
    """
    from serve_app.accounting.ledger import Ledger  # imported here, because it loads the databases' libraries

    def steps(query: dict[str, str | None]) -> Report:
        found = ledger.run(CheckBooks(query["full"] == "true", query.get("after")))
        problems = [{"kind": one.kind, "subject": one.subject, "message": one.message} for one in found.differences]
        counts = {name: getattr(found, name) for name in ("ok", "accounts", "entries", "usage_rows", "next", "done")}
        return counts | {"problems": problems}

    try:
        with Ledger(database, migrate=False) as ledger:
            yield steps
    except LedgerError as error:
        raise CommandError(str(error), code="ledger") from None


@command(
    app, "archive", examples=("serve-app ledger archive --before 2026-10 --database URL --folder ledger-to-2026-09",)
)
def archive_ledger(
    session: Session,
    before: Annotated[str, typer.Option(metavar="YYYY-MM", help="First month to keep in the ledger.")],
    database: Annotated[str, typer.Option(metavar="URL", help="Database URL of the ledger; the service may run.")],
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the files.")],
) -> None:
    """Move the charges and requests of closed months into files. Their sums stay, so the books can still be checked.

    After an interruption, repeat the command with the same options. Daily usage, top-ups, grants and corrections stay.
    """
    from serve_app.accounting.archive import archive_months

    with _opened_database(database) as opened:
        made = archive_months(opened, before, folder, time.time(), session.out.progress.step)
    session.out.record({"folder": str(folder), **made}, [("folder", folder), *made.items()])


def _verify(session: Session, database: str | None, folder: Path) -> None:
    from serve_app.accounting.archive import verify_archive

    if database is None:
        raise UsageError("--archive compares files with a ledger: add its --database")
    with _opened_database(database) as opened:
        found = verify_archive(opened, folder)
    session.out.record({"ok": True, **found}, [("ok", True), *found.items()])


@contextmanager
def _opened_database(url: str) -> Iterator[Database]:
    """Opens the database. A LedgerError, also one from the `with` body, becomes a CommandError."""
    from serve_app.accounting.database import Database

    try:
        database = Database(url)
        try:
            database.expect_head()
            yield database
        finally:
            database.close()
    except LedgerError as error:
        raise CommandError(str(error), code="ledger") from None


@command(
    app,
    "stuck",
    examples=("serve-app ledger stuck", "serve-app ledger stuck --retry REQUEST_ID", "serve-app ledger stuck --all"),
)
def list_stuck(
    session: Session,
    retry: Annotated[
        list[str] | None, typer.Option(metavar="REQUEST_ID", help="Settle this request again; may be repeated.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Settle all of them again.")] = False,
) -> None:
    """List settlements that the ledger could not settle, or settle them again.

    Their tokens were delivered and are not billed yet. Remove the cause first: the reason names it. Without an option,
    the command only lists. With one, exit code 1 if any settlement is still stuck.
    """
    if retry and everything:
        raise UsageError("use either --retry or --all")
    if not retry and not everything:
        _show(session, session.client.first_rows("ledger", "stuck", limit=None), empty="Nothing is stuck.")
        return
    ids = retry or [one["id"] for one in session.client.first_rows("ledger", "stuck", limit=None)]
    still: list[dict[str, Any]] = []
    for first in range(0, len(ids), MAX_RETRIED):
        body = {"ids": ids[first : first + MAX_RETRIED]}
        still += session.client.api_post("ledger", "stuck", "retry", body=body)["data"]
    _show(session, still, empty="None of them is stuck any more.")
    if still:
        raise typer.Exit(1)


def _show(session: Session, stuck: list[dict[str, Any]], *, empty: str) -> None:
    session.out.table(
        {"data": stuck},
        ("request", "reason", "account", "model", "prompt", "completion", "tries", "last try"),
        [
            (
                one["id"],
                one["reason"],
                one["account_id"],
                one["settlement"].get("model"),
                one["settlement"].get("prompt_tokens"),
                one["settlement"].get("completion_tokens"),
                one["tries"],
                one["last_at"],
            )
            for one in stuck
        ],
        ids=("account", "model"),
        wide=("account", "model", "prompt", "completion", "last try"),
        empty=empty,
    )
