"""`serve-app keys …`: API keys of an account. A key is shown once, when it is made."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command

app = typer.Typer(help="Create, list and revoke API keys.")

AccountId = Annotated[str, typer.Argument(metavar="ACCOUNT_ID", help="Id as `accounts list` shows it.")]


@command(app, "create")
def create(
    session: Session,
    account_id: AccountId,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Where the key is used.")] = None,
) -> None:
    """Make an API key. It is shown this once: the service keeps a digest only."""
    body = {"name": name} if name is not None else {}
    key = session.client.post("accounts", account_id, "keys", body=body)
    session.out.record(
        key,
        [("key", key["key"]), ("id", key["id"]), ("name", key.get("name")), ("account", key["account_id"])],
        note="Keep the key now: it can't be shown again.",
    )


@command(app, "list")
def list_keys(session: Session, account_id: AccountId) -> None:
    """List an account's API keys."""
    keys = session.client.get("accounts", account_id, "keys")["data"]
    session.out.table(
        {"data": keys},
        ("id", "name", "hint", "status", "created", "revoked"),
        [_row(key) for key in keys],
        empty=f"No keys yet. Next: serve-app keys create {account_id}",
    )


@command(app, "revoke")
def revoke(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="Id as `keys list` shows it.")],
) -> None:
    """Revoke an API key. Requests with it are refused from then on."""
    key = session.client.delete("keys", key_id)
    session.out.record(
        key,
        [("id", key["id"]), ("name", key.get("name")), ("status", key["status"]), ("revoked", key.get("revoked_at"))],
    )


def _row(key: dict[str, Any]) -> tuple[object, ...]:
    return key["id"], key.get("name"), key.get("hint"), key["status"], key["created_at"], key.get("revoked_at")
