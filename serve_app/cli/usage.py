"""`serve-app usage`: shows usage. The `export` module writes the files of `serve-app usage export`."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, group_action
from serve_app.cli.completion import AccountOption, KeyOption, ModelOption
from serve_app.cli.output import UsageError
from serve_app.cli.values import parse_day

# Values of --group-by, and the fields that they name in the response's rows.
GROUPS = {"day": "day", "model": "model", "account": "account_id", "key": "key_id", "tag": "tag"}
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")

app = typer.Typer(name="usage", help="Show and export requests, tokens and charges.")

FILTERS = {
    "account": AccountOption,
    "key": KeyOption,
    "model": ModelOption,
    "tag": Annotated[
        str | None, typer.Option(metavar="TAG", help="Only keys that have this tag now. '': keys without tags.")
    ],
    "first": Annotated[str | None, typer.Option("--from", metavar="DAY", help="First day, UTC: 2026-11-01.")],
    "last": Annotated[str | None, typer.Option("--to", metavar="DAY", help="Last day, UTC: 2026-11-30.")],
}
Filters = Annotated[dict[str, str], FILTERS]


@group_action(
    app,
    examples=(
        "serve-app usage --from 2026-11-01 --group-by account,model",
        "serve-app usage --account ACCOUNT_ID --group-by tag",
        "serve-app usage export --from 2026-11-01 --to 2026-11-30 --output nov.csv",
    ),
)
def show_usage(
    session: Session,
    filters: Filters,
    group_by: Annotated[
        str, typer.Option(metavar="FIELDS", help=f"Fields to group by, separated by commas: {', '.join(GROUPS)}.")
    ] = "day,model",
) -> None:
    """Show requests, tokens and charges. `export` writes them to a file: one row per request, or sums."""
    groups = parse_groups(group_by)
    rows = session.client.api_get("usage", query=parse_filters(filters) | {"group_by": ",".join(groups)})["data"]
    session.out.table(
        {"data": rows},
        (*groups, "charged", "requests", "prompt", "cached", "completion"),
        [[_cell(row, name) for name in (*(GROUPS[group] for group in groups), "charged", *COUNTS)] for row in rows],
        ids=groups,
        empty="Nothing was used.",
        footer="A key with several tags counts in each of them." if "tag" in groups else _total(rows),
    )


def parse_groups(group_by: str) -> list[str]:
    """Parses the grouping. Raises UsageError."""
    groups = [name.strip() for name in group_by.split(",") if name.strip()]
    unknown = [name for name in groups if name not in GROUPS]
    if unknown or not groups:
        raise UsageError(f"--group-by {group_by}: must be one or more of {', '.join(GROUPS)}, separated by commas")
    return groups


def parse_filters(given: dict[str, str]) -> dict[str, str | None]:
    """Returns the filters as the API's query. The first and the last day are both included. Raises UsageError."""
    first, last = parse_day("--from", given.get("first")), parse_day("--to", given.get("last"))
    if first and last and first > last:
        raise UsageError(f"--from {first} is after --to {last}")
    return {**{name: given.get(name) for name in ("account", "key", "model", "tag")}, "from": first, "to": last}


def _cell(row: dict[str, Any], name: str) -> object:
    return "no tag" if name == "tag" and row.get(name) == "" else row.get(name)


def _total(rows: list[dict[str, Any]]) -> str:
    requests = sum(row["requests"] for row in rows)
    charged = sum((Decimal(row["charged"]) for row in rows), Decimal(0))
    return f"total: {requests:,} requests, {charged:f} charged"
