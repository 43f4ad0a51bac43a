"""Gives every command the same options (`--url`, `--operator-key-file`, `--operator`, `--json`) and one way to fail."""

from __future__ import annotations

import getpass
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli.client import AdminClient
from serve_app.cli.connection import Connection, resolve
from serve_app.cli.errors import CommandError, usage_error
from serve_app.cli.output import Output

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Address of the service. [SERVE_APP_URL, else http://127.0.0.1:$PORT]"),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--operator-key-file",
        metavar="FILE",
        help="File with the operator key. [SERVE_APP_OPERATOR_KEY, else SERVE_APP_HOME/secrets/operator-key]",
    ),
]
OperatorOption = Annotated[
    str | None,
    typer.Option(
        "--operator", metavar="NAME", help="Who you are, for the audit log. [SERVE_APP_OPERATOR, else user@host]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass
class Given:
    """The shared options as they were typed before the command's name."""

    url: str | None = None
    key_file: Path | None = None
    operator: str | None = None
    as_json: bool = False

    def over(self, earlier: Given) -> Given:
        """These options where they were typed, else the earlier ones."""
        return Given(
            self.url or earlier.url,
            self.key_file or earlier.key_file,
            self.operator or earlier.operator,
            self.as_json or earlier.as_json,
        )


@dataclass(frozen=True)
class Session:
    """What a command works with: the connection, the output, and a client that is opened when first asked for."""

    connection: Connection
    out: Output
    _clients: list[AdminClient] = field(default_factory=list)

    @property
    def client(self) -> AdminClient:
        """The admin client of this command."""
        if not self._clients:
            self._clients.append(AdminClient(self.connection))
        return self._clients[0]

    def close(self) -> None:
        """Close the connection if one was opened."""
        for client in self._clients:
            client.__exit__(None, None, None)


_SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
    for name, annotation, default in (
        ("context", typer.Context, inspect.Parameter.empty),
        ("url", UrlOption, None),
        ("key_file", KeyFileOption, None),
        ("operator", OperatorOption, None),
        ("as_json", JsonOption, False),
    )
]


def command(
    app: typer.Typer, name: str, *, examples: Sequence[str] = (), signed: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function `(session, …)` as a command with the shared options, which may stand before or after it.

    A CommandError that it raises is printed (as JSON under `--json`) and becomes the exit code. `examples` end its
    help; `signed` lets arguments begin with a minus.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, given: Given, arguments: dict[str, Any]) -> None:
            _run(function, given, arguments)

        settings = {"ignore_unknown_options": True} if signed else None
        app.command(name, epilog=_epilog(examples), context_settings=settings)(_with_shared_options(function, run))
        return function

    return register


def own_action(
    app: typer.Typer, *, examples: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function `(session, …)` as what a group of commands does when none of them is named."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, given: Given, arguments: dict[str, Any]) -> None:
            if context.invoked_subcommand is None:
                _run(function, given, arguments)
                return
            context.obj = given
            for name in arguments:
                # Taken for nothing, they would let the command do more than was meant.
                if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                    Output(given.as_json).failure(
                        usage_error(f"the options of `{context.invoked_subcommand}` belong behind its name")
                    )
                    raise typer.Exit(2)

        app.callback(invoke_without_command=True, epilog=_epilog(examples))(_with_shared_options(function, run))
        return function

    return register


def _with_shared_options(
    function: Callable[..., None], run: Callable[[typer.Context, Given, dict[str, Any]], None]
) -> Callable[..., None]:
    """What the command line is shown of the function: its own parameters and the shared ones."""
    signature = inspect.signature(function, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "session"
    ]

    def shown(
        *,
        context: typer.Context,
        url: str | None,
        key_file: Path | None,
        operator: str | None,
        as_json: bool,
        **arguments: Any,
    ) -> None:
        run(context, Given(url, key_file, operator, as_json).over(context.obj or Given()), arguments)

    shown.__doc__ = function.__doc__
    shown.__signature__ = signature.replace(parameters=[*own, *_SHARED])  # type: ignore[attr-defined]
    shown.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *_SHARED]}
    return shown


def _run(function: Callable[..., None], given: Given, arguments: dict[str, Any]) -> None:
    out = Output(given.as_json)
    try:
        connection = resolve(
            given.url, given.key_file, os.environ, Path.cwd(), operator=given.operator, somebody=_somebody()
        )
        session = Session(connection, out)
        try:
            function(session, **arguments)
        finally:
            session.close()
    except CommandError as failure:
        out.failure(failure)
        raise typer.Exit(failure.exit_code) from None


def _somebody() -> str:
    """user@host, of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user without a name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _epilog(examples: Sequence[str]) -> str | None:
    # The control character keeps the lines as they are.
    return "\n".join(["Examples:", "", "\b", *(f"  {line}" for line in examples)]) if examples else None
