"""The operator's command line, `serve-app`. It talks to the service's admin API over HTTP and to nothing else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from serve_app import __version__
from serve_app.cli import accounts, audit, dashboards, doctor, export, funds, keys, usage
from serve_app.cli.command import Given, JsonOption, KeyFileOption, OperatorOption, UrlOption
from serve_app.cli.errors import CommandError
from serve_app.cli.output import Output

__all__ = ["app", "main"]

app = typer.Typer(
    name="serve-app",
    help="Operate a serve-app service: accounts, API keys, funds, limits, usage, audit log.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
funds.register(accounts.app)
app.add_typer(accounts.app, name="accounts")
app.add_typer(keys.app, name="keys")
export.register(usage.app)
usage.register(app)
app.add_typer(audit.app, name="audit")
doctor.register(app)
app.add_typer(dashboards.app, name="dashboards")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serve-app {__version__}")
        raise typer.Exit()


@app.callback()
def _shared_options(
    context: typer.Context,
    url: UrlOption = None,
    key_file: KeyFileOption = None,
    operator: OperatorOption = None,
    as_json: JsonOption = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    context.obj = Given(url, key_file, operator, as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit: 0 done, 1 failed, 2 the command line is wrong. Ctrl-C ends it by the signal."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is open that needs closing. Python's own handler runs only between two instructions, and a signal that
        # comes just before a system call is noticed when that returns.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = app(given, prog_name="serve-app", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        sys.exit(_wrong_command_line(error, as_json="--json" in given))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough. Python must not flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _wrong_command_line(error: typer.TyperException, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "serve-app"
    message = f"{error.format_message().rstrip('.')}; see `{path} --help`"
    Output(as_json).failure(CommandError(message, code="usage", exit_code=error.exit_code))
    return error.exit_code
