"""`serve-app audit list`: what operators have changed, and who they were."""

from __future__ import annotations

import json
from itertools import chain, islice
from typing import Annotated, Any

import typer

from serve_app.cli.client import PAGE_SIZE
from serve_app.cli.command import Session, command

app = typer.Typer(help="What operators have changed.")


@command(
    app,
    "list",
    examples=("serve-app audit list --limit 20", "serve-app audit list --account ACCOUNT_ID --json"),
)
def list_records(
    session: Session,
    account: Annotated[str | None, typer.Option(metavar="ACCOUNT_ID", help="Of one account.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
) -> None:
    """List changes, newest first: when, who, what, of what, and from where."""
    pages = session.client.pages("audit", account=account, limit=min(limit, PAGE_SIZE))
    records = list(islice(chain.from_iterable(pages), limit))
    session.out.table(
        {"data": records},
        ("at", "who", "action", "subject", "detail", "request", "address"),
        [
            (r["at"], r["actor"], r["action"], r["subject"], _detail(r["detail"]), r["request_id"], r["address"])
            for r in records
        ],
        empty="Nothing was changed yet.",
    )


def _detail(detail: dict[str, Any]) -> str | None:
    """Fields in one line: `rpm: 60`, or `rpm: 60 → 90` for what was and is."""
    return "; ".join(f"{name}: {_value(value)}" for name, value in detail.items()) or None


def _value(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"was", "is"}:
        return f"{_value(value['was'])} → {_value(value['is'])}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
