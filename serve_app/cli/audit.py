"""`serve-app audit list`: lists changes and the operators who made them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountOption
from serve_app.cli.output import short_time

app = typer.Typer(name="audit", help="Changes made by operators.")


@command(
    app,
    "list",
    examples=("serve-app audit list --limit 20", "serve-app audit list --account ACCOUNT_ID --json"),
)
def list_audit(
    session: Session,
    account: AccountOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of records.")] = 100,
) -> None:
    """List changes, reads, failed log-ins and new prices, newest first, with time, actor, subject and address."""
    records = session.client.first_rows("audit", limit=limit, query={"account": account}, say=session.out.progress.say)
    session.out.table(
        {"data": records},
        ("time", "action", "subject", "actor", "detail", "request", "address"),
        [
            (
                short_time(r["at"]),
                r["action"],
                r["subject"],
                r["actor"],
                _detail_text(r["detail"]),
                r["request_id"],
                r["address"],
            )
            for r in records
        ],
        ids=("subject", "request", "address"),
        wide=("request", "address"),
        empty="There are no records yet.",
    )


def _detail_text(detail: dict[str, Any]) -> str | None:
    """Formats fields in one line: `rpm: 60`, or `rpm: 60 → 90` for a change."""
    return "; ".join(f"{name}: {_value_text(value)}" for name, value in detail.items()) or None


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"was", "is"}:
        return f"{_value_text(value['was'])} → {_value_text(value['is'])}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
