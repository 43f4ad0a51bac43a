"""`serve-app`, also `python -m serve_app.cli`: registers every command, and sets the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from serve_app import __version__
from serve_app.cli import (
    accounts,
    audit,
    backup,
    cluster,
    dashboards,
    doctor,
    export,
    funds,
    keys,
    ledger,
    models,
    models_backends,
    models_created,
    models_fetch,
    models_traffic,
    people,
    requests,
    sealed_secrets,
    size,
    statements,
    top,
    usage,
)
from serve_app.cli.command import Session, group_action
from serve_app.cli.output import CommandError, Output

# In the order of `serve-app --help`. A module's group is `app`; without a name, its commands are top-level.
MODELS = (models, models_traffic, models_backends, models_created, models_fetch)
MODULES = (
    *MODELS,
    doctor,
    top,
    accounts,
    funds,
    statements,
    keys,
    sealed_secrets,
    people,
    usage,
    export,
    size,
    cluster,
    requests,
    ledger,
    backup,
    audit,
    dashboards,
)

app = typer.Typer(
    name="serve-app",
    help="Operate a serve-app service: accounts, API keys, funds, limits, usage, audit log.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in dict.fromkeys(module.app for module in MODULES):
    app.add_typer(group)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serve-app {__version__}")
        raise typer.Exit()


# Options that may precede a command's name.
@group_action(app, alone=False)
def _root_options(
    session: Session,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0 done, 1 failed, 2 wrong command line. Ctrl-C ends the process by its signal."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # End the process at once. A command that must clean up sets its own handler. Python's default handler runs only
        # between two instructions: after a signal just before a system call, it would run when the call returns.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = app(given, prog_name="serve-app", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        path = context.command_path if (context := getattr(error, "ctx", None)) else "serve-app"
        message = f"{error.format_message().rstrip('.')}; see `{path} --help`"
        as_json = bool({"--json", "-ojson"} & set(given)) or ("-o", "json") in pairwise(given)
        Output("json" if as_json else None).failure(CommandError(message, code="usage"))
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
