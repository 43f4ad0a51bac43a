"""`serve-app models`: what is served."""

from __future__ import annotations

import typer

from serve_app.cli.command import Session, command

app = typer.Typer()


@command(app, "models")
def list_backends(session: Session) -> None:
    """Show the served model identifiers, what stands behind them, and their prices."""
    data = session.client.api_get("models")["data"]
    session.out.table(
        {"data": data},
        ("model", "backend", "weight", "status", "replicas", "input", "cached input", "output"),
        [
            (
                model["id"],
                *(backend[field] for field in ("name", "weight", "status", "replicas")),
                *(model["price"][field] for field in ("input", "cached_input", "output")),
            )
            for model in data
            for backend in model["backends"]
        ],
        empty="No model is configured.",
        footer="Prices are per million tokens.",
    )
