"""`serve-app`, also `python -m serve_app.cli`: every command, and how the command line ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
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
    top,
    usage,
)
from serve_app.cli.command import Session, group_action
from serve_app.cli.output import CommandError, Output

# In the order of `serve-app --help`. Each module names its group in `app`; without a name its commands stand alone.
MODELS = (models, models_traffic, models_backends, models_created, models_fetch)
MODULES = (
    *MODELS,
    doctor,
    top,
    accounts,
    funds,
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


# The options that may stand before a command's name.
@group_action(app, alone=False)
def _root_options(
    session: Session,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit: 0 done, 1 failed, 2 wrong command line. Ctrl-C ends the process by its signal."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # No command holds anything that must be closed. Python's own handler runs only between two instructions: a
        # signal that comes just before a system call would wait until the call returns.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = app(given, prog_name="serve-app", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        path = context.command_path if (context := getattr(error, "ctx", None)) else "serve-app"
        message = f"{error.format_message().rstrip('.')}; see `{path} --help`"
        Output("--json" in given).failure(CommandError(message, code="usage"))
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # The reader, `head` for instance, has closed the pipe. At exit Python must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
