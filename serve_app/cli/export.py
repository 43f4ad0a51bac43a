"""`serve-app usage export`: usage as a CSV or JSON file, request by request or summed, of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.errors import usage_error
from serve_app.cli.output_file import whole_file
from serve_app.cli.progress import Progress
from serve_app.cli.usage import (
    COUNTS,
    GROUPS,
    AccountFilter,
    FirstDay,
    KeyFilter,
    LastDay,
    ModelFilter,
    groups_of,
    period_of,
)
from serve_app.exports import FORMATS, REQUEST_COLUMNS

PAGE_SIZE = 1000  # requests, all that is kept at once

Pages = Iterator[list[dict[str, Any]]]


def register(app: typer.Typer) -> None:
    """Add `export` to the group of `serve-app usage`."""
    command(
        app,
        "export",
        examples=(
            "serve-app usage export --from 2026-11-01 --to 2026-11-30 --output nov.csv",
            "serve-app usage export --account ACCOUNT_ID --format json | jq '.[].charged'",
            "serve-app usage export --group-by day,account --from 2026-11-01",
        ),
    )(export)


def export(
    session: Session,
    account: AccountFilter = None,
    key: KeyFilter = None,
    model: ModelFilter = None,
    first: FirstDay = None,
    last: LastDay = None,
    group_by: Annotated[
        str | None, typer.Option(metavar=",".join(GROUPS), help="Sums, one row for each, instead of requests.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="|".join(FORMATS), help="JSON is one array, an object on each line. [default: csv]"
        ),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FILE|-", help="Written as a whole or not at all; `-` is standard output.")
    ] = "-",
) -> None:
    """Write usage to a file: each billed request, or sums. Times are UTC, charges exact decimals."""
    only_json = session.out.as_json and output == "-"
    form = form or ("json" if only_json else "csv")
    if form not in FORMATS:
        raise usage_error(f"--format {form}: must be {' or '.join(FORMATS)}")
    if only_json and form != "json":
        raise usage_error("--json and --format csv contradict each other on standard output: give --output FILE")
    first, last = period_of(first, last)
    query = {"account": account, "key": key, "model": model, "from_": first, "to": last}
    if group_by is None:
        columns: tuple[str, ...] = REQUEST_COLUMNS
        pages: Pages = session.client.pages("usage", "requests", limit=PAGE_SIZE, **query)
    else:
        groups = groups_of(group_by)
        columns = (*(GROUPS[name] for name in groups), *COUNTS, "charged")
        pages = _sums(session, {**query, "group_by": ",".join(groups)})
    place: AbstractContextManager[TextIO] = nullcontext(sys.stdout) if output == "-" else whole_file(Path(output))
    with place as file:
        # Under --json standard error is for one JSON object, should it fail.
        progress = Progress(sys.stderr, "rows", quiet=session.out.as_json)
        rows, charged = _write(file, form, columns, pages, progress)
    if output != "-":
        session.out.record(
            {"file": output, "format": form, "rows": rows, "charged": f"{charged:f}"},
            [("file", output), ("rows", rows), ("charged", f"{charged:f}")],
        )


def _sums(session: Session, query: dict[str, str | None]) -> Pages:
    yield session.client.get("usage", **query)["data"]


def _write(file: TextIO, form: str, columns: tuple[str, ...], pages: Pages, progress: Progress) -> tuple[int, Decimal]:
    """Write page by page; how many rows there were and what they were charged together."""
    made = FORMATS[form](columns)
    charged = Decimal(0)
    try:
        file.write(made.head())
        for page in pages:
            file.write(made.rows(page))
            charged += sum(Decimal(row["charged"]) for row in page)
            progress.add(len(page))
        file.write(made.tail())
        return progress.count, charged
    finally:
        progress.close()
