"""`serve-app keys …`: manages an account's API keys and their permissions. A key is shown once, when it is created."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountId, KeyId, complete_model
from serve_app.cli.output import UsageError
from serve_app.cli.values import EXPIRY, KEY_LIMIT_OPTIONS, parse_expiry, parse_limits, plain_amount
from serve_app.contracts.limits import KEY_LIMITS

app = typer.Typer(name="keys", help="Create, list, change and revoke API keys.")

PERIODS = ("day", "month")

TERMS = {
    "name": Annotated[str | None, typer.Option(metavar="NAME", help="Name of the key, for example where it is used.")],
    "model": Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL", help="Allow this model; repeat it for more. any: all.", autocompletion=complete_model
        ),
    ],
    "tag": Annotated[
        list[str] | None,
        typer.Option(metavar="TAG", help="Sum usage by this tag; repeat it for more. none: no tags."),
    ],
    "address": Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Allow this address or network; repeat it for more. any: all."),
    ],
    **KEY_LIMIT_OPTIONS,
    "budget": Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Maximum charge --per day or month (UTC), or none.")
    ],
    "per": Annotated[str | None, typer.Option(metavar="PERIOD", help="Period of the budget: day or month.")],
    "expires": Annotated[
        str | None,
        typer.Option(metavar="WHEN", help=f"Expiry of the key: {EXPIRY}, or never."),
    ],
}
Terms = Annotated[dict[str, Any], TERMS]


@command(
    app,
    "create",
    examples=(
        "serve-app keys create ACCOUNT_ID --name laptop",
        "serve-app keys create ACCOUNT_ID --model svc-coder --rpm 30 --expires 30d",
        "serve-app keys create ACCOUNT_ID --name ci --budget 2.50 --per day",
        "serve-app keys create ACCOUNT_ID --tag team-a --tag batch --address 10.0.0.0/8",
    ),
)
def create_key(session: Session, account_id: AccountId, terms: Terms) -> None:
    """Create an API key. It is shown only once: the service stores only a digest."""
    fields = _fields_of(terms)
    if (fields.get("budget") is None) != ("per" not in terms):
        raise UsageError("--budget and --per belong together: --budget 2.50 --per day")
    body = {name: value for name, value in fields.items() if value is not None}
    key = session.client.api_post("accounts", account_id, "keys", body=body)
    session.out.record(
        key,
        [("key", key["key"]), *(row for row in _key_rows(key) if row[0] not in ("hint", "status", "created"))],
        note="Save the key now: it can't be shown again.",
    )


@command(app, "list")
def list_keys(session: Session, account_id: AccountId) -> None:
    """List an account's API keys."""
    keys = session.client.api_get("accounts", account_id, "keys")["data"]
    session.out.table(
        {"data": keys},
        (
            "id",
            "name",
            "status",
            "budget used",
            "models",
            "hint",
            "tags",
            "addresses",
            "limits",
            "created",
            "expires",
            "revoked",
        ),
        [_row(key) for key in keys],
        ids=("hint",),
        wide=("models", "hint", "tags", "addresses", "limits", "created", "expires", "revoked"),
        empty=f"No keys yet. Next: serve-app keys create {account_id}",
    )


@command(
    app,
    "update",
    examples=(
        "serve-app keys update KEY_ID --model svc-chat --model svc-coder --rpm 60",
        "serve-app keys update KEY_ID --budget 20 --per month",
        "serve-app keys update KEY_ID --model any --budget none --expires never --tag none --address any",
    ),
)
def change_key(session: Session, key_id: KeyId, terms: Terms) -> None:
    """Change a key's permissions and limits everywhere, within a second. Omitted options stay unchanged."""
    changes = _fields_of(terms)
    if not changes:
        *options, last = (f"--{option}" for option in TERMS)
        raise UsageError(f"nothing to change: give {', '.join(options)} or {last}")
    key = session.client.api_patch("keys", key_id, body=changes)
    session.out.record(key, _key_rows(key))


@command(app, "revoke")
def revoke_key(session: Session, key_id: KeyId) -> None:
    """Revoke an API key. Requests with it are rejected from then on."""
    key = session.client.api_delete("keys", key_id)
    session.out.record(
        key,
        [("id", key["id"]), ("name", key.get("name")), ("status", key["status"]), ("revoked", key.get("revoked_at"))],
    )


def _fields_of(terms: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the API's request, in which None removes a restriction. Raises UsageError."""
    fields: dict[str, Any] = {"name": terms["name"]} if "name" in terms else {}
    for option, name, word in (("model", "models", "any"), ("tag", "tags", "none"), ("address", "addresses", "any")):
        if values := terms.get(option):
            if word in values and len(values) > 1:
                raise UsageError(f"--{option} {word} and another --{option} cannot be combined")
            fields[name] = None if values == [word] else values
    fields |= parse_limits({limit: terms[limit] for limit in KEY_LIMITS if limit in terms}, word="none")
    budget, per, expires = terms.get("budget"), terms.get("per"), terms.get("expires")
    if per is not None and per not in PERIODS:
        raise UsageError(f"--per {per}: must be {' or '.join(PERIODS)}")
    if budget == "none":
        if per is not None:
            raise UsageError("--budget none and --per cannot be combined")
        fields |= {"budget": None, "budget_period": None}
    elif budget is not None:
        fields["budget"] = plain_amount(budget)
    if per is not None:
        fields["budget_period"] = per
    if expires is not None:
        fields["expires_at"] = None if expires == "never" else parse_expiry(expires, datetime.now(UTC))
    return fields


def _key_rows(key: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "id", key["id"]
    yield "name", key.get("name")
    yield "hint", key.get("hint")
    yield "account", key["account_id"]
    yield "status", key.get("status")
    yield "models", ", ".join(key.get("models") or ()) or "any"
    yield "tags", ", ".join(key.get("tags") or ()) or "none"
    yield "addresses", ", ".join(key.get("addresses") or ()) or "any"
    for name in KEY_LIMITS:
        own = (key.get("limits") or {}).get(name)
        yield name, f"{own:,}" if own is not None else "the account's"
    if key.get("budget") is not None:
        yield "budget", f"{key['budget']} per {key['budget_period']}"
        yield "  spent", f"{key['spent']}, renews at {key['renews_at']}"
    yield "expires", key.get("expires_at") or "never"
    yield "created", key["created_at"]


def _row(key: dict[str, Any]) -> tuple[object, ...]:
    own = key.get("limits") or {}
    limits = ", ".join(f"{name} {own[name]:,}" for name in KEY_LIMITS if own.get(name) is not None)
    spent = f"{key['spent']} of {key['budget']} per {key['budget_period']}" if key.get("budget") is not None else None
    return (
        *(key.get(field) for field in ("id", "name", "status")),
        spent,
        ", ".join(key.get("models") or ()) or "any",
        key.get("hint"),
        ", ".join(key.get("tags") or ()) or None,
        ", ".join(key.get("addresses") or ()) or "any",
        limits or None,
        *(key.get(field) for field in ("created_at", "expires_at", "revoked_at")),
    )
