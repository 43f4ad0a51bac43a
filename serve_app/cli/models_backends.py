"""`serve-app models deploy|retire|backends`: manages backends in addition to those of `config.yaml`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import complete_backend
from serve_app.cli.models import app
from serve_app.cli.output import CommandError, UsageError
from serve_app.cli.values import parse_pairs
from serve_app.contracts.served import BACKEND_OPTIONS

POLL_S = 1.0
pause: Callable[[float], None] = time.sleep
clock: Callable[[], float] = time.monotonic
FAILED = ("DEPLOY_FAILED",)  # Serve has given up

Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Maximum seconds to wait.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return immediately.")]


@command(
    app,
    "deploy",
    examples=(
        "serve-app models deploy chat-v2 --arg model=Qwen/Qwen2.5-7B-Instruct --arg dtype=bfloat16",
        "serve-app models deploy chat-v2 --like smollm2 --arg num_threads=4 --replicas 2",
        "serve-app models deploy chat-v2 --args chat-v2.yaml --option autoscaling_config='{min_replicas: 0, …}'",
    ),
)
def deploy(
    session: Session,
    name: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            help="New name, or that of an earlier backend with equal args and options. It can't be changed later.",
        ),
    ],
    arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="One setting, as in `args` in config.yaml.")
    ] = None,
    args: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with `args`.")] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="APPLICATION", help="Start from the settings of an application in config.yaml."),
    ] = None,
    config: Annotated[Path, typer.Option(metavar="FILE", help="Config file for --like.")] = Path("config.yaml"),
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="One deployment option, as in config.yaml.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Fixed number of replicas, without autoscaling.")] = None,
    timeout: Timeout = 1800.0,
    no_wait: NoWait = False,
) -> None:
    """Start a backend and wait until it is healthy. It gets no requests yet: see `canary`."""
    settings, options = ({}, {}) if like is None else _application(config, like)
    settings |= ({} if args is None else _mapping(args)) | parse_pairs("--arg", arg or ())
    options |= parse_pairs("--option", option or ())
    if replicas is not None:
        options = {name: value for name, value in options.items() if name != "autoscaling_config"}
        options["num_replicas"] = replicas
    if not settings:
        raise UsageError("the backend has no settings: give --arg model=NAME, --args FILE or --like APPLICATION")
    backend = session.client.api_post("backends", body={"name": name, "args": settings, "options": options})
    if not no_wait:
        backend = _wait(session, name, timeout, lambda one: bool(one["healthy"]), "is not healthy")
    _print_backend(session, backend, f"Next: serve-app models canary {name} --for MODEL --share 5")


@command(app, "retire", examples=("serve-app models retire chat-v1",))
def retire(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="BACKEND", help="Backend without traffic.", autocompletion=complete_backend)
    ],
    timeout: Timeout = 1800.0,
    no_wait: NoWait = False,
) -> None:
    """Stop a backend that serves no identifier, and wait until its last stream has ended."""
    backend = session.client.api_post("backends", name, "retire")
    if not no_wait:
        backend = _wait(session, name, timeout, lambda one: one["status"] == "MISSING", "still runs")
    _print_backend(session, backend)


@command(app, "backends")
def list_backends(session: Session) -> None:
    """List the backends that serve an identifier, and those deployed with `models deploy`."""
    found = session.client.api_get("backends")["data"]
    session.out.table(
        {"data": found},
        ("backend", "health", "status", "replicas", "serves", "declared in", "retired"),
        [
            (
                one["name"],
                "ready" if one["healthy"] else "not ready",
                one["status"],
                one["replicas"],
                _serves(one),
                one["source"],
                one["retired_at"],
            )
            for one in found
        ],
        wide=("declared in", "retired"),
        empty="There are no backends.",
    )


def _wait(
    session: Session, name: str, timeout_s: float, is_done: Callable[[dict[str, Any]], bool], what: str
) -> dict[str, Any]:
    """Waits until `is_done(backend)`, and returns the backend. Prints each change of its state on standard error."""
    started, shown = clock(), ""
    while True:
        backend = session.client.api_get("backends", name)
        state = f"{name}: {backend['status']}, {backend['replicas']} replicas ready"
        if state != shown:
            shown = state
            session.out.progress.log(f"{clock() - started:5.0f} s  {state}")
            session.out.progress.say(f"waiting for {name}")
        if is_done(backend):
            return backend
        if backend["status"] in FAILED and backend["retired_at"] is None:
            raise CommandError(
                f"{name} can't be deployed: {backend['message'] or 'see the logs of the service'}. "
                f"Remove it with `serve-app models retire {name}` and deploy under another name",
                code="deploy_failed",
            )
        if clock() - started > timeout_s:
            detail = f": {backend['message']}" if backend["message"] else ""
            raise CommandError(
                f"{name} {what} after {timeout_s:g} s ({backend['status']}{detail}). The service continues; "
                "repeat the command to wait longer",
                code="timeout",
            )
        pause(POLL_S)


def _print_backend(session: Session, backend: dict[str, Any], note: str = "") -> None:
    fields = [
        ("backend", backend["name"]),
        ("health", "ready" if backend["healthy"] else "not ready"),
        ("status", backend["status"]),
        ("replicas", backend["replicas"]),
        ("serves", _serves(backend)),
    ]
    session.out.record(backend, fields, note=note)


def _serves(backend: dict[str, Any]) -> str:
    uses = (
        f"{one['model']} "
        + ("as fallback" if one["is_fallback"] and not one["share"] else f"{100 * one['share']:.4g}%")
        for one in backend["serves"]
    )
    return ", ".join(uses) or "nothing"


def _mapping(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file. Raises UsageError."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: must be a YAML mapping")
    return found


def _application(config: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `args` and the deployment's options of an application in a config file."""
    applications = {one.get("name"): one for one in _mapping(config).get("applications") or ()}
    found = applications.get(name)
    if found is None or not str(found.get("import_path")).endswith(":model"):
        raise UsageError(f"--like {name}: {config} has no model application of that name")
    deployment = (found.get("deployments") or [{}])[0]
    options = {option: value for option, value in deployment.items() if option in BACKEND_OPTIONS}
    return dict(found.get("args") or {}), options
