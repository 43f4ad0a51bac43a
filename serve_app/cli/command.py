"""Registers the commands. Each gets the shared options (`--url`, `--operator-key-file`, …) and error handling."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from serve_app.cli.client import AdminClient
from serve_app.cli.connection import Connection, SharedOptions, resolve
from serve_app.cli.output import CommandError, Output, UsageError
from serve_app.cli.progress import Progress


@dataclass(frozen=True)
class Session:
    """The connection, client and output of a command."""

    connection: Connection
    client: AdminClient
    out: Output


Action = Callable[..., None]
EXAMPLE_COLUMNS = 74
_SHARED = {option.name: option.default for option in fields(SharedOptions)}


def command(
    app: typer.Typer, name: str, *, examples: Sequence[str] = (), signed: bool = False
) -> Callable[[Action], Action]:
    """Registers a function `(session, …)` as a command with the shared options, which may precede or follow its name.

    A CommandError that it raises is printed (as JSON under `-o json`) and becomes the exit code. The help ends with
    `examples`. With `signed`, arguments may begin with a minus. One parameter can stand for several options: its
    annotation has a mapping of names to options, and the function gets a mapping of the options that were given.
    """

    def register(action: Action) -> Action:
        settings = {"ignore_unknown_options": True} if signed else None
        app.command(name, epilog=_epilog(examples), context_settings=settings)(_for_typer(action))
        return action

    return register


def group_action(app: typer.Typer, *, examples: Sequence[str] = (), alone: bool = True) -> Callable[[Action], Action]:
    """Registers a function `(session, …)` that runs if the command line names the group but none of its commands.

    With `alone` False, a command must be named, and the function only declares the group's options.
    """

    def register(action: Action) -> Action:
        app.callback(invoke_without_command=alone, epilog=_epilog(examples))(_for_typer(action))
        return action

    return register


def _for_typer(action: Action) -> Action:
    """Returns a function for typer. Its signature has the action's parameters, then the shared options."""
    signature = inspect.signature(action, eval_str=True)
    annotations: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    bundles: dict[str, list[str]] = {}
    for name, parameter in list(signature.parameters.items())[1:]:
        if options := next((part for part in get_args(parameter.annotation) if isinstance(part, dict)), None):
            bundles[name] = list(options)
            annotations |= options
            defaults |= dict.fromkeys(options)
        else:
            annotations[name], defaults[name] = parameter.annotation, parameter.default
    annotations |= {"context": typer.Context} | get_type_hints(SharedOptions, include_extras=True)
    defaults |= {"context": inspect.Parameter.empty} | _SHARED

    def for_typer(context: typer.Context, **arguments: Any) -> None:
        shared = SharedOptions(**{name: arguments.pop(name) for name in _SHARED}).over(context.obj or SharedOptions())
        if context.invoked_subcommand is not None:
            context.obj = shared
            for name in arguments:
                # The command would not get this option, so it might do more than the operator wants.
                if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                    error = UsageError(f"put the options of `{context.invoked_subcommand}` after its name")
                    Output("json" if shared.as_json or shared.output_form == "json" else None).failure(error)
                    raise typer.Exit(error.exit_code)
            return
        for bundle, names in bundles.items():
            values = {name: arguments.pop(name) for name in names}
            arguments[bundle] = {name: value for name, value in values.items() if value is not None}
        _run_action(action, shared, arguments)

    for_typer.__doc__ = action.__doc__
    for_typer.__annotations__ = annotations
    for_typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=defaults[name])
            for name, annotation in annotations.items()
        ]
    )
    return for_typer


def _run_action(action: Action, shared: SharedOptions, arguments: dict[str, Any]) -> None:
    out = Output()
    try:
        form = shared.checked_form()
        out = Output(form, Progress(quiet=form in ("json", "yaml")))
        out.progress.start()
        connection = resolve(shared, os.environ, Path.cwd())
        with AdminClient(connection) as client:
            action(Session(connection, client, out), **arguments)
    except CommandError as failure:
        out.failure(failure)
        raise typer.Exit(failure.exit_code) from None
    finally:
        out.progress.end()


def _epilog(examples: Sequence[str]) -> str | None:
    # The character `\b` makes Click keep the line breaks.
    lines = [f"  {line}" for example in examples for line in _example_lines(example)]
    return "\n".join(["Examples:", "", "\b", *lines]) if examples else None


def _example_lines(example: str) -> list[str]:
    """Breaks a long example before its options. Puts the example's comment on a line above."""
    if len(example) <= EXAMPLE_COLUMNS:
        return [example]
    text, _, comment = example.partition("   ")
    lines = [f"# {comment.strip()}"] if comment else []
    line = ""
    for part in re.split(r" (?=--)", text):
        if line and len(f"{line} {part}") > EXAMPLE_COLUMNS - len(" \\"):
            lines.append(f"{line} \\")
            line = ""
        line = f"{line} {part}" if line else part if part.startswith("serve-app") else f"    {part}"
    return [*lines, line]
