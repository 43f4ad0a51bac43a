"""`serve-app models create|update|remove|price`: manages identifiers created by command, and all prices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import Identifier
from serve_app.cli.models import app, print_details
from serve_app.cli.output import UsageError
from serve_app.cli.values import parse_numbers, parse_pairs, parse_start

InputPrice = Annotated[str, typer.Option(metavar="PRICE", help="Price per million prompt tokens, such as 0.27.")]
CachedPrice = Annotated[str, typer.Option(metavar="PRICE", help="Price per million cached prompt tokens.")]
OutputPrice = Annotated[str, typer.Option(metavar="PRICE", help="Price per million output tokens.")]
ContextLength = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum tokens of prompt and reply.")]
MaxOutput = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum tokens of a reply.")]
Temperatures = Annotated[
    list[str] | None, typer.Option(metavar="USE=VALUE", help="Temperature that /models recommends for a use.")
]
Defaults = Annotated[
    list[str] | None,
    typer.Option(
        "--default", metavar="NAME=VALUE", help="Sampling default for requests without a value: temperature=0.7."
    ),
]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        metavar="NAME",
        help="Further name for clients: gpt-4o-mini, or claude-* for all names that begin with claude-.",
    ),
]
Seconds = Annotated[float | None, typer.Option(metavar="SECONDS", help="Latency target; alerts watch it.")]


@command(
    app,
    "create",
    examples=(
        "serve-app models create team-chat --backend chat-v2 --context-length 8192 --max-output 1024 "
        "--input 0.10 --cached-input 0.05 --output 0.30",
        "serve-app models create team-chat … --default temperature=0.6 --fallback small",
    ),
)
def create_model(
    session: Session,
    model: Identifier,
    *,
    backend: Annotated[
        list[str],
        typer.Option(metavar="NAME[=WEIGHT]", help="Backend that replies; several share the requests by weight."),
    ],
    context_length: ContextLength,
    max_output: MaxOutput,
    input: InputPrice,
    cached_input: CachedPrice,
    output: OutputPrice,
    fallback: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Backend that replies while the others can't.")
    ] = None,
    temperature: Temperatures = None,
    default: Defaults = None,
    first_token_target: Seconds = None,
    output_token_target: Seconds = None,
    alias: Aliases = None,
) -> None:
    """Create an identifier with its limits, prices, backends and defaults."""
    named = [one if "=" in one else f"{one}=100" for one in backend]
    weights = parse_numbers("--backend", named, whole=True)
    body = {
        "id": model,
        "weights": {name: int(weight) for name, weight in weights.items()},
        "price": {"input": input, "cached_input": cached_input, "output": output},
        "context_length": context_length,
        "max_output": max_output,
        **_changes(temperature, default, first_token_target, output_token_target, fallback, alias),
    }
    print_details(session, session.client.api_post("models", body=body))


@command(
    app,
    "update",
    examples=(
        "serve-app models update team-chat --max-output 2048 --default temperature=0.7 --default top_p=0.95",
        "serve-app models update team-chat --fallback none",
        "serve-app models update team-chat --alias gpt-4o-mini --alias 'claude-*'",
    ),
)
def update_model(
    session: Session,
    model: Identifier,
    context_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum tokens of prompt and reply.")
    ] = None,
    max_output: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum tokens of a reply.")] = None,
    fallback: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Backend that replies while the others can't, or none.")
    ] = None,
    temperature: Temperatures = None,
    default: Defaults = None,
    first_token_target: Seconds = None,
    output_token_target: Seconds = None,
    alias: Aliases = None,
) -> None:
    """Change a created identifier. Omitted options stay unchanged.

    --default, --temperature and --alias each replace all earlier values of their kind. `--alias none` removes all.
    """
    body = _changes(temperature, default, first_token_target, output_token_target, fallback, alias)
    body |= {} if context_length is None else {"context_length": context_length}
    body |= {} if max_output is None else {"max_output": max_output}
    if not body:
        raise UsageError("nothing to change: pass an option")
    print_details(session, session.client.api_patch("models", model, body=body))


@command(app, "remove")
def remove_model(session: Session, model: Identifier) -> None:
    """Remove a created identifier. Its backends stay; requests that name it are refused with 422."""
    removed = session.client.api_delete("models", model)
    session.out.record(removed, [("removed", removed["id"])])


@command(
    app,
    "price",
    examples=(
        "serve-app models price svc-chat --input 0.30 --cached-input 0.08 --output 1.20 --at 2026-12-01",
        "serve-app models price svc-chat --input 0.30 --cached-input 0.08 --output 1.20     from now on",
    ),
)
def set_price(
    session: Session,
    model: Identifier,
    *,
    input: InputPrice,
    cached_input: CachedPrice,
    output: OutputPrice,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="When the prices take effect: in 12h, or on 2026-12-31 (0:00 UTC). Default: now."
        ),
    ] = None,
) -> None:
    """Set the prices of an identifier, now or from a given time. Requests admitted earlier keep their prices."""
    body: dict[str, Any] = {"input": input, "cached_input": cached_input, "output": output}
    if at is not None:
        body["effective_at"] = parse_start("--at", at, datetime.now(UTC))
    price = session.client.api_post("models", model, "prices", body=body)
    fields = [("model", model), ("in effect from", price["effective_at"])]
    fields += [(name.replace("_", " "), price[name]) for name in ("input", "cached_input", "output")]
    session.out.record(price, fields)


def _changes(
    temperatures: Sequence[str] | None,
    defaults: Sequence[str] | None,
    first_token_s: float | None,
    output_token_s: float | None,
    fallback: str | None,
    aliases: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns the given fields, in the form of the API."""
    changes: dict[str, Any] = {"first_token_target_s": first_token_s, "output_token_target_s": output_token_s}
    changes["recommended_temperatures"] = temperatures and parse_numbers("--temperature", temperatures)
    changes["sampling"] = defaults and parse_pairs("--default", defaults)
    changes["aliases"] = [] if aliases == ["none"] else aliases
    changes = {name: value for name, value in changes.items() if value is not None}
    return changes | ({} if fallback is None else {"fallback": None if fallback == "none" else fallback})
