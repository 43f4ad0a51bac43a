"""Gives every command the same options (`--url`, `--operator-key-file`, `--json`) and one way to fail."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli.client import AdminClient
from serve_app.cli.connection import Connection, resolve
from serve_app.cli.errors import CommandError
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass
class Given:
    """The shared options as they were typed before the command's name."""

    url: str | None = None
    key_file: Path | None = None
    as_json: bool = False


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
    inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, annotation=UrlOption, default=None),
    inspect.Parameter("key_file", inspect.Parameter.KEYWORD_ONLY, annotation=KeyFileOption, default=None),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, annotation=JsonOption, default=False),
]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function `(session, …)` as a command with the shared options, which may stand before or after it.

    A CommandError that it raises is printed (as JSON under `--json`) and becomes the exit code.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != "session"
        ]

        def run(
            *, context: typer.Context, url: str | None, key_file: Path | None, as_json: bool, **arguments: Any
        ) -> None:
            given: Given = context.obj or Given()
            out = Output(as_json or given.as_json)
            try:
                connection = resolve(url or given.url, key_file or given.key_file, os.environ, Path.cwd())
                session = Session(connection, out)
                try:
                    function(session, **arguments)
                finally:
                    session.close()
            except CommandError as failure:
                out.failure(failure)
                raise typer.Exit(failure.exit_code) from None

        run.__doc__ = function.__doc__
        run.__signature__ = signature.replace(parameters=[*own, *_SHARED])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *_SHARED]}
        app.command(name)(run)
        return function

    return register
