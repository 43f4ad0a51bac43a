"""`serve-app models`: lists identifiers and their backends. The group's other commands are in separate modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from serve_app.cli.command import Session, command, group_action
from serve_app.cli.completion import Identifier
from serve_app.contracts.served import SamplingDefaults

app = typer.Typer(name="models")

COLUMNS = ("model", "backend", "share", "health", "input", "cached", "output", "replicas", "status", "set by")


@group_action(
    app,
    examples=(
        "serve-app models",
        "serve-app models deploy chat-v2 --like smollm2 --arg revision=1f3a",
        "serve-app models canary chat-v2 --for svc-chat --share 5",
        "serve-app models promote chat-v2 --for svc-chat",
        "serve-app models rollback --for svc-chat",
        "serve-app models retire chat-v1",
    ),
)
def models(session: Session) -> None:
    """Show the served model identifiers, their backends and prices; shift traffic between backends."""
    list_models(session)


@command(app, "list")
def list_models(session: Session) -> None:
    """List all identifiers, their backends with share and health, and prices."""
    print_models(session, session.client.api_get("models")["data"])


@command(app, "show", examples=("serve-app models show svc-chat",))
def show_model(session: Session, model: Identifier) -> None:
    """Show one identifier: limits, past and future prices, and its traffic history."""
    print_details(session, session.client.api_get("models", model))


def print_models(session: Session, found: Sequence[dict[str, Any]], *, note: str = "") -> None:
    rows = [
        (
            model["id"],
            one["name"],
            f"{100 * one['share']:.4g}%",
            "ejected" if one["ejected"] else "ready" if one["healthy"] else "not ready",
            *(model["price"][field] for field in ("input", "cached_input", "output")),
            one["replicas"],
            one["status"],
            _set_by(model),
        )
        for model in found
        for one in model["backends"]
    ]
    session.out.table(
        {"data": list(found)},
        COLUMNS,
        rows,
        ids=("backend",),
        wide=("replicas", "status", "set by"),
        empty="No model is configured.",
        footer="Prices are per million tokens." + (f"\n{note}" if note else ""),
    )


def print_details(session: Session, model: dict[str, Any]) -> None:
    session.out.record(model, _fields(model))
    if session.out.form not in (None, "wide"):
        return
    session.out.line("")
    session.out.table(
        model,
        ("version", "at", "weights", "by", "reason"),
        [
            (row["version"], row["changed_at"], weights_text(row["weights"]), row["actor"], _reason(row))
            for row in model["history"]
        ],
        empty="The weights were never changed by a command.",
    )
    if model["prices"]:
        session.out.line("")
        session.out.table(
            model,
            ("in effect from", "input", "cached input", "output"),
            [(one["effective_at"], one["input"], one["cached_input"], one["output"]) for one in model["prices"]],
            empty="",
        )


def weights_text(weights: dict[str, int]) -> str:
    """Formats weights, such as "old 95%, new 5%"."""
    total = max(1, sum(weights.values()))
    return ", ".join(f"{name} {100 * weight / total:.4g}%" for name, weight in weights.items()) or "as in config.yaml"


def _fields(model: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "id", model["id"]
    yield "declared in", model["source"]
    yield "context length", model["context_length"]
    yield "max output", model["max_output"]
    yield "backends", weights_text({one["name"]: one["weight"] for one in model["backends"]})
    for one in model["backends"]:
        if one["ejected"] or not one["healthy"]:
            yield f"  {one['name']}", "ejected" if one["ejected"] else f"not ready: {one['status']}"
    yield "fallback", model["fallback"]
    yield "aliases", ", ".join(model["aliases"]) or None
    yield "weights set by", _set_by(model)
    yield "rollback restores", None if model["rollback"] is None else weights_text(model["rollback"])
    yield "price", " / ".join(model["price"][name] for name in ("input", "cached_input", "output"))
    yield "first token", f"{model['first_token_target_s']:g} s is the target"
    yield "output token", f"{model['output_token_target_s']:g} s is the target"
    for use, temperature in model["recommended_temperatures"].items():
        yield f"temperature for {use}", temperature
    for name in SamplingDefaults.__slots__:
        if name in model["sampling"]:
            yield f"default {name}", model["sampling"][name]


def _set_by(model: dict[str, Any]) -> str:
    """Returns the actor who set the current weights."""
    traffic = model["traffic"]
    return "config.yaml" if traffic is None else f"{traffic['actor']}, version {traffic['version']}"


def _reason(row: dict[str, Any]) -> str:
    undone = "" if row["undoes"] is None else f"undoes version {row['undoes']}"
    return ": ".join(part for part in (undone, row["reason"]) if part)
