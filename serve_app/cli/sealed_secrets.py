"""`serve-app secrets`: shows whether the previous secret key can be removed."""

from __future__ import annotations

from typing import Any

import typer

from serve_app.cli.command import Session, command

app = typer.Typer()


@command(app, "secrets", examples=("serve-app secrets", "serve-app secrets --json"))
def show_secrets(session: Session) -> None:
    """Show whether the previous secret key is still needed. A running console reseals stored secrets."""
    found = session.client.api_get("sealed-secrets")
    rows = [
        ("previous secret key", "valid" if found["has_previous"] else "not set"),
        ("secrets under the current key", found["current"]),
        ("secrets under another key", found["outdated"]),
    ]
    session.out.record(found, rows, note=advice(found))


def advice(found: dict[str, Any]) -> str:
    """Returns the next step for the operator."""
    if not found["outdated"]:
        if not found["has_previous"]:
            return "The current secret key opens every stored secret."
        return "You can remove the previous secret key once every gateway and console has the current one."
    if not found["has_previous"]:
        return (
            "One-time codes and webhooks that are sealed under another key fail. Set SERVE_APP_SECRET_KEY_PREVIOUS "
            "to that key, and start a console."
        )
    return "Keep the previous secret key until the console has resealed the secrets. It does so every five minutes."
