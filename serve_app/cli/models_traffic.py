"""`serve-app models canary|promote|rollback|weights`: sets a backend's share of an identifier's requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import Identifier, complete_backend, complete_model
from serve_app.cli.models import app, print_models, weights_text
from serve_app.cli.output import UsageError
from serve_app.cli.values import parse_numbers

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="Deployed backend.", autocompletion=complete_backend)]
For = Annotated[
    list[str],
    typer.Option("--for", metavar="MODEL", help="Identifier; may be repeated.", autocompletion=complete_model),
]
Reason = Annotated[str, typer.Option(help="Reason, for the history.")]


@command(
    app,
    "canary",
    examples=(
        "serve-app models canary chat-v2 --for svc-chat --share 5",
        "serve-app models canary chat-v2 --for svc-chat --share 0      removes its share",
    ),
)
def set_canary(
    session: Session,
    backend: Backend,
    identifiers: For,
    share: Annotated[float, typer.Option(min=0, max=100, help="Percentage of the requests.")],
    reason: Reason = "",
) -> None:
    """Give a backend a share of an identifier's requests. The other backends keep their proportions.

    If the backend fails or is late while another one runs, it loses its share within seconds, and the roll-out is
    rolled back.
    """
    _change(session, identifiers, "canary", {"backend": backend, "share": share, "reason": reason})


@command(app, "promote", examples=("serve-app models promote chat-v2 --for svc-chat",))
def promote(session: Session, backend: Backend, identifiers: For, reason: Reason = "") -> None:
    """Give a backend all requests of an identifier. Running streams continue on their current backend."""
    _change(session, identifiers, "promote", {"backend": backend, "reason": reason})


@command(app, "rollback", examples=('serve-app models rollback --for svc-chat --reason "worse answers"',))
def roll_back(
    session: Session,
    identifiers: For,
    reason: Reason = "",
    again: Annotated[bool, typer.Option("--again", help="After a rollback, also undo the previous roll-out.")] = False,
) -> None:
    """Restore the weights from before the roll-out. One rollback undoes all steps of the roll-out."""
    for identifier in identifiers:
        traffic = session.client.api_get("models", identifier)["traffic"]
        if traffic is not None and traffic["undoes"] is not None and not again:
            raise UsageError(
                f"{identifier} is rolled back already, by {traffic['actor']} at {traffic['changed_at']}; "
                "use --again to undo one more roll-out"
            )
    _change(session, identifiers, "rollback", {"reason": reason})


@command(
    app,
    "weights",
    examples=(
        "serve-app models weights svc-chat chat-v1=1 chat-v2=3",
        "serve-app models weights svc-chat --as-configured",
    ),
)
def set_weights(
    session: Session,
    identifier: Identifier,
    weights: Annotated[
        list[str] | None,
        typer.Argument(metavar="BACKEND=WEIGHT", help="Weight of each backend, such as old=1.", show_default=False),
    ] = None,
    as_configured: Annotated[bool, typer.Option("--as-configured", help="Restore the weights of config.yaml.")] = False,
    reason: Reason = "",
) -> None:
    """Set the weights of all backends of an identifier."""
    if bool(weights) == as_configured:
        raise UsageError("give either BACKEND=WEIGHT, once for each backend, or --as-configured")
    given = {name: int(weight) for name, weight in parse_numbers("BACKEND=WEIGHT", weights or (), whole=True).items()}
    _change(session, [identifier], "traffic", {"weights": given, "reason": reason})


def _change(session: Session, identifiers: list[str], operation: str, body: dict[str, Any]) -> None:
    changed = [session.client.api_post("models", one, operation, body=body) for one in identifiers]
    notes = [
        f"A rollback of {model['id']} restores: {weights_text(model['rollback'])}."
        for model in changed
        if model["rollback"] is not None
    ]
    print_models(session, changed, note="\n".join(notes))
