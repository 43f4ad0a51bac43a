"""`serve-app usage`, `ledger check` and `models`: what was used, whether the books add up, what is served.

The files that `serve-app usage export` writes are in `export`.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command, own_action
from serve_app.cli.errors import usage_error

# Option value -> the field that rows of the answer carry.
GROUPS = {"day": "day", "model": "model", "account": "account_id", "key": "key_id"}
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")

app = typer.Typer(help="Show and export requests, tokens and charges.")
ledger = typer.Typer(help="The books.")

AccountFilter = Annotated[str | None, typer.Option("--account", metavar="ACCOUNT_ID", help="Of one account.")]
KeyFilter = Annotated[str | None, typer.Option("--key", metavar="KEY_ID", help="Of one API key.")]
ModelFilter = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Of one model identifier.")]
FirstDay = Annotated[str | None, typer.Option("--from", metavar="YYYY-MM-DD", help="First day, UTC.")]
LastDay = Annotated[str | None, typer.Option("--to", metavar="YYYY-MM-DD", help="Last day, UTC.")]


def register(root: typer.Typer) -> None:
    """Add the commands of this module to the command line's root."""
    root.add_typer(app, name="usage")
    command(root, "models")(models)
    root.add_typer(ledger, name="ledger")


@own_action(
    app,
    examples=(
        "serve-app usage --from 2026-11-01 --group-by account,model",
        "serve-app usage export --from 2026-11-01 --to 2026-11-30 --output nov.csv",
    ),
)
def usage(
    session: Session,
    account: AccountFilter = None,
    key: KeyFilter = None,
    model: ModelFilter = None,
    first: FirstDay = None,
    last: LastDay = None,
    group_by: Annotated[str, typer.Option(metavar=",".join(GROUPS), help="One row for each.")] = "day,model",
) -> None:
    """Show requests, tokens and charges. `export` writes them as a file, also request by request."""
    groups = groups_of(group_by)
    first, last = period_of(first, last)
    rows = session.client.get(
        "usage", account=account, key=key, model=model, from_=first, to=last, group_by=",".join(groups)
    )["data"]
    session.out.table(
        {"data": rows},
        (*groups, *(name.replace("_", " ") for name in COUNTS), "charged"),
        [(*(row.get(GROUPS[name]) for name in groups), *_counts(row)) for row in rows],
        empty="Nothing was used.",
        footer=_total(rows),
    )


def models(session: Session) -> None:
    """Show the served model identifiers, what stands behind them, and their prices."""
    data = session.client.get("models")["data"]
    session.out.table(
        {"data": data},
        ("model", "backend", "weight", "status", "replicas", "input", "cached input", "output"),
        [_model_row(model, backend) for model in data for backend in model["backends"]],
        empty="No model is configured.",
        footer="Prices are per million tokens.",
    )


@command(ledger, "check")
def check(session: Session) -> None:
    """Check that the books agree with themselves. Exit code 1 if anything does not.

    Every entry sums to zero; balances and what is left of grants equal their postings; sums per day and what keys have
    spent of their budgets equal the requests; charges equal counts times prices; nothing is missing from the journal
    or the audit log.
    """
    report = session.client.get("ledger", "check")
    if session.out.as_json:
        session.out.json(report)
    elif report["ok"]:
        session.out.line(
            f"ok: {report['entries']:,} journal entries add up; {report['accounts']:,} accounts, "
            f"{report['usage_rows']:,} requests, grants, budgets and the audit log agree"
        )
    else:
        session.out.table(
            report,
            ("kind", "subject", "problem"),
            [(problem["kind"], problem["subject"], problem["message"]) for problem in report["problems"]],
            empty="The books do not add up; the service does not say where.",
        )
    if not report["ok"]:
        raise typer.Exit(1)


def _counts(row: dict[str, Any]) -> tuple[object, ...]:
    return (*(row[name] for name in COUNTS), row["charged"])


def _total(rows: list[dict[str, Any]]) -> str:
    requests = sum(row["requests"] for row in rows)
    charged = sum((Decimal(row["charged"]) for row in rows), Decimal(0))
    return f"total: {requests:,} requests, {charged:f} charged"


def _model_row(model: dict[str, Any], backend: dict[str, Any]) -> tuple[object, ...]:
    price = model["price"]
    return (
        model["id"],
        backend["name"],
        backend["weight"],
        backend["status"],
        backend["replicas"],
        price["input"],
        price["cached_input"],
        price["output"],
    )


def groups_of(group_by: str) -> list[str]:
    """What to group by. Raises a usage error."""
    groups = [name.strip() for name in group_by.split(",") if name.strip()]
    unknown = [name for name in groups if name not in GROUPS]
    if unknown or not groups:
        raise usage_error(f"--group-by {group_by}: must be some of {', '.join(GROUPS)}")
    return groups


def period_of(first: str | None, last: str | None) -> tuple[str | None, str | None]:
    """First and last day, both included. Raises a usage error."""
    first, last = _day("--from", first), _day("--to", last)
    if first and last and first > last:
        raise usage_error(f"--from {first} is after --to {last}")
    return first, last


def _day(option: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise usage_error(f"{option} {text}: must be a day like 2026-11-30") from None
