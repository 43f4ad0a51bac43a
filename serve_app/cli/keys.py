"""`serve-app keys …`: API keys of an account and what each may do. A key is shown once, when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serve_app.cli.accounts import AccountId
from serve_app.cli.amounts import amount_of
from serve_app.cli.command import Session, command
from serve_app.cli.errors import usage_error
from serve_app.cli.expiry import METAVAR, expiry_of
from serve_app.cli.limits import LIMITS, limits_of

app = typer.Typer(help="Create, list, change and revoke API keys.")

PERIODS = ("day", "month")

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="Id as `keys list` shows it.")]
NameOption = Annotated[str | None, typer.Option(metavar="NAME", help="Where the key is used.")]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", metavar="MODEL|any", help="May use this model; repeat it for more.")
]
KeyLimit = Annotated[
    str | None, typer.Option(metavar="N|none", help="Of the key itself, beside the account's; `none`: only those.")
]
BudgetOption = Annotated[
    str | None, typer.Option(metavar="AMOUNT|none", help="What may be charged to the key in a day or month, UTC.")
]
PeriodOption = Annotated[str | None, typer.Option("--per", metavar="day|month", help="When the budget renews.")]
ExpiryOption = Annotated[
    str | None,
    typer.Option(metavar=f"{METAVAR}|never", help="Refused from then on; a day counts to its end, UTC."),
]


@command(
    app,
    "create",
    examples=(
        "serve-app keys create ACCOUNT_ID --name laptop",
        "serve-app keys create ACCOUNT_ID --model svc-coder --rpm 30 --expires 30d",
        "serve-app keys create ACCOUNT_ID --name ci --budget 2.50 --per day",
    ),
)
def create(
    session: Session,
    account_id: AccountId,
    name: NameOption = None,
    model: ModelOption = None,
    rpm: KeyLimit = None,
    tpm: KeyLimit = None,
    concurrency: KeyLimit = None,
    budget: BudgetOption = None,
    per: PeriodOption = None,
    expires: ExpiryOption = None,
) -> None:
    """Make an API key. It is shown this once: the service keeps a digest only."""
    terms = _terms(model, rpm, tpm, concurrency, budget, per, expires)
    if (terms.get("budget") is None) != (per is None):
        raise usage_error("--budget and --per belong together: --budget 2.50 --per day")
    body = {field: value for field, value in terms.items() if value is not None}
    if name is not None:
        body["name"] = name
    key = session.client.post("accounts", account_id, "keys", body=body)
    session.out.record(
        key,
        [("key", key["key"]), *(field for field in _fields(key) if field[0] not in ("hint", "status", "created"))],
        note="Keep the key now: it can't be shown again.",
    )


@command(app, "list")
def list_keys(session: Session, account_id: AccountId) -> None:
    """List an account's API keys."""
    keys = session.client.get("accounts", account_id, "keys")["data"]
    session.out.table(
        {"data": keys},
        ("id", "name", "hint", "status", "models", "limits", "spent", "created", "expires", "revoked"),
        [_row(key) for key in keys],
        empty=f"No keys yet. Next: serve-app keys create {account_id}",
    )


@command(
    app,
    "update",
    examples=(
        "serve-app keys update KEY_ID --model svc-chat --model svc-coder --rpm 60",
        "serve-app keys update KEY_ID --budget 20 --per month",
        "serve-app keys update KEY_ID --model any --budget none --expires never",
    ),
)
def update(
    session: Session,
    key_id: KeyId,
    name: NameOption = None,
    model: ModelOption = None,
    rpm: KeyLimit = None,
    tpm: KeyLimit = None,
    concurrency: KeyLimit = None,
    budget: BudgetOption = None,
    per: PeriodOption = None,
    expires: ExpiryOption = None,
) -> None:
    """Change what a key may do, within a second everywhere. What is not given stays."""
    changes = _terms(model, rpm, tpm, concurrency, budget, per, expires)
    if name is not None:
        changes["name"] = name
    if not changes:
        raise usage_error(
            "nothing to change: give --name, --model, --rpm, --tpm, --concurrency, --budget, --per or --expires"
        )
    key = session.client.patch("keys", key_id, body=changes)
    session.out.record(key, _fields(key))


@command(app, "revoke")
def revoke(session: Session, key_id: KeyId) -> None:
    """Revoke an API key. Requests with it are refused from then on."""
    key = session.client.delete("keys", key_id)
    session.out.record(
        key,
        [("id", key["id"]), ("name", key.get("name")), ("status", key["status"]), ("revoked", key.get("revoked_at"))],
    )


def _terms(
    models: list[str] | None,
    rpm: str | None,
    tpm: str | None,
    concurrency: str | None,
    budget: str | None,
    per: str | None,
    expires: str | None,
) -> dict[str, Any]:
    """What was given, as the API takes it; None takes a bound away. Raises a usage error."""
    terms: dict[str, Any] = {}
    if models:
        if "any" in models and len(models) > 1:
            raise usage_error("--model any and another --model contradict each other")
        terms["models"] = None if models == ["any"] else models
    terms |= limits_of({"rpm": rpm, "tpm": tpm, "concurrency": concurrency}, word="none")
    if per is not None and per not in PERIODS:
        raise usage_error(f"--per {per}: must be {' or '.join(PERIODS)}")
    if budget == "none":
        if per is not None:
            raise usage_error("--budget none and --per contradict each other")
        terms |= {"budget": None, "budget_period": None}
    elif budget is not None:
        terms["budget"] = amount_of(budget)
    if per is not None:
        terms["budget_period"] = per
    if expires is not None:
        terms["expires_at"] = None if expires == "never" else expiry_of("--expires", expires, datetime.now(UTC))
    return terms


def _fields(key: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "id", key["id"]
    yield "name", key.get("name")
    yield "hint", key.get("hint")
    yield "account", key["account_id"]
    yield "status", key.get("status")
    yield "models", ", ".join(key.get("models") or ()) or "any"
    for name in LIMITS:
        own = (key.get("limits") or {}).get(name)
        yield name, f"{own:,}" if own is not None else "the account's"
    if key.get("budget") is not None:
        yield "budget", f"{key['budget']} a {key['budget_period']}"
        yield "  spent", f"{key['spent']}, renews at {key['renews_at']}"
    yield "expires", key.get("expires_at") or "never"
    yield "created", key["created_at"]


def _row(key: dict[str, Any]) -> tuple[object, ...]:
    own = key.get("limits") or {}
    limits = ", ".join(f"{name} {own[name]:,}" for name in LIMITS if own.get(name) is not None)
    spent = f"{key['spent']} of {key['budget']} a {key['budget_period']}" if key.get("budget") is not None else None
    return (
        key["id"],
        key.get("name"),
        key.get("hint"),
        key["status"],
        ", ".join(key.get("models") or ()) or "any",
        limits or None,
        spent,
        key["created_at"],
        key.get("expires_at"),
        key.get("revoked_at"),
    )
