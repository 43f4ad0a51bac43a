"""`serve-app usage export`: exports any amount of usage as CSV or JSON, with one row per request or per group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.complete_file import complete_file
from serve_app.cli.output import UsageError
from serve_app.cli.progress import Progress
from serve_app.cli.usage import COUNTS, GROUPS, Filters, app, parse_filters, parse_groups
from serve_app.storage.exports import FORMATS, REQUEST_COLUMNS

PAGE_SIZE = 1000  # requests; the maximum in memory at one time

Pages = Iterable[list[dict[str, Any]]]


@command(
    app,
    "export",
    examples=(
        "serve-app usage export --from 2026-11-01 --to 2026-11-30 --output nov.csv",
        "serve-app usage export --account ACCOUNT_ID --format json | jq '.[].charged'",
        "serve-app usage export --group-by day,account --from 2026-11-01",
    ),
)
def export_usage(
    session: Session,
    filters: Filters,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS",
            help=f"Export sums, not requests. Fields to group by, separated by commas: {', '.join(GROUPS)}.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=f"{' or '.join(FORMATS)}; JSON is one array, one object per line. Default: csv, with --json json.",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(metavar="FILE", help="Output file, written completely or not at all; - is standard output."),
    ] = "-",
) -> None:
    """Write usage to a file: each settled request, or sums. Times are in UTC, charges are exact decimals."""
    only_json = session.out.is_document and output == "-"
    form = form or ("json" if only_json else "csv")
    if form not in FORMATS:
        raise UsageError(f"--format {form}: must be {' or '.join(FORMATS)}")
    if only_json and form != "json":
        raise UsageError("--json and --format csv cannot be combined on standard output: add --output FILE")
    query = parse_filters(filters)
    if group_by is None:
        columns: tuple[str, ...] = REQUEST_COLUMNS
        pages: Pages = session.client.pages("usage", "requests", page_size=PAGE_SIZE, query=query)
    else:
        groups = parse_groups(group_by)
        columns = (*(GROUPS[name] for name in groups), *COUNTS, "charged")
        pages = _sums(session, query | {"group_by": ",".join(groups)})
    standard = contextlib.nullcontext(sys.stdout)
    with standard if output == "-" else complete_file(Path(output), "w", encoding="utf-8", newline="") as file:
        if output == "-" and sys.stdout.isatty():
            session.out.progress.end()  # progress lines would mix with the rows on the screen
        rows, charged = _write_all(file, form, columns, pages, session.out.progress)
    if output != "-":
        session.out.record(
            {"file": output, "format": form, "rows": rows, "charged": f"{charged:f}"},
            [("file", output), ("rows", rows), ("charged", f"{charged:f}")],
        )


def _sums(session: Session, query: dict[str, str | None]) -> Pages:
    yield session.client.api_get("usage", query=query)["data"]


def _write_all(
    file: IO[str], form: str, columns: tuple[str, ...], pages: Pages, progress: Progress
) -> tuple[int, Decimal]:
    """Writes page by page. Returns the number of rows and the sum of their charges."""
    encoder = FORMATS[form](columns)
    count, charged = 0, Decimal(0)
    file.write(encoder.head())
    for page in pages:
        file.write(encoder.rows(page))
        charged += sum(Decimal(row["charged"]) for row in page)
        count += len(page)
        progress.say(f"{count:,} rows")
    file.write(encoder.tail())
    return count, charged
