"""`serve-app doctor`: checks this machine and the service, one line per check, with a hint for each failure."""

from __future__ import annotations

import contextlib
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from serve_app.cli.client import AdminClient, Json
from serve_app.cli.command import Session, command
from serve_app.cli.connection import Connection
from serve_app.cli.output import CommandError, UsageError
from serve_app.contracts.units import GIB
from serve_app.storage.private_files import OTHERS, is_loopback, is_open_to_others

MIN_PYTHON = (3, 11)
MIN_MEMORY_GIB = 2.0
MIN_DISK_GIB = 2.0
LOCAL = ("memory", "disk", "state folder", "secrets", "sockets", "ports")  # checks of this machine's service
FLAGS = Path("cluster/flags.env")
LOG = "check the service's log"

T = TypeVar("T")

app = typer.Typer()


@dataclass(frozen=True)
class Check:
    """One line of the report. `status` is `ok`, `fail`, or `skip` if the check is not possible."""

    name: str
    status: str
    detail: str
    hint: str = ""


@command(
    app,
    "doctor",
    examples=("serve-app doctor", "serve-app doctor --cluster --grace-period 780   on a node of the cluster"),
)
def doctor(
    session: Session,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check every node of the running Ray cluster.")] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of the cluster's head. Default: the one that Ray finds."),
    ] = None,
    flags: Annotated[
        Path, typer.Option(metavar="FILE", help="File with the flags that every node of the cluster should have.")
    ] = FLAGS,
    firewall: Annotated[
        bool, typer.Option("--firewall", help="Confirm that a firewall or network policy closes Ray's ports.")
    ] = False,
    grace_period: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Grace period of the cluster's pods or units.")
    ] = None,
) -> None:
    """Check this machine and the service, or with --cluster the nodes of the running Ray cluster.

    Works while the service is down. Exit code 1 if a check fails.
    """
    if cluster:
        from serve_app.cli.doctor_cluster import diagnose  # imported here, because loading the settings takes long

        diagnose(session.out, address, flags, firewall, grace_period)
        return
    if address is not None or firewall or grace_period is not None or flags != FLAGS:
        raise UsageError("--address, --flags, --firewall and --grace-period need --cluster: add it")
    checks = [*machine_checks(session.connection), *service_checks(session.client, session.connection)]
    ok = all(check.status != "fail" for check in checks)
    document = {"ok": ok, "checks": [asdict(check) for check in checks]}
    if not session.out.document(document, [check.name for check in checks]):
        width = max(len(check.name) for check in checks)
        for check in checks:
            session.out.line(f"{check.status.ljust(4)}  {check.name.ljust(width)}  {check.detail}")
            if check.hint:
                session.out.line(f"      {' ' * width}  → {check.hint}")
    if not ok:
        raise typer.Exit(1)


def machine_checks(connection: Connection) -> Iterator[Check]:
    """Checks Python and, if the service runs on this machine, its memory, disk, files and open ports."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield _judge("python", sys.version_info[:2] >= MIN_PYTHON, version, "install Python 3.11 or newer")
    if not connection.is_local:
        yield from _skipped("the service runs on another machine", *LOCAL)
        return
    if connection.is_named and connection.is_of_home() is False:
        yield from _skipped(f"the service is not that of {connection.home}; set SERVE_APP_HOME", *LOCAL)
        return
    yield _memory()
    yield _disk(connection.home)
    yield from state_checks(connection)
    yield from run_checks(connection.home)


def state_checks(connection: Connection) -> Iterator[Check]:
    """Checks that the state folder exists and that only its owner can enter it and read its secrets."""
    home = connection.home
    if not home.is_dir():
        if connection.key_is_from_home:
            hint = "start the service once (`make serve`), or set SERVE_APP_HOME to its folder"
            yield Check("state folder", "fail", f"{home} does not exist", hint)
        else:
            yield Check("state folder", "skip", f"{home} does not exist, but the operator key is from another source")
        yield Check("secrets", "skip", "no state folder")
        return
    is_open = is_open_to_others(home)
    detail = f"other users can enter {home} ({_mode(home):04o})" if is_open else str(home)
    yield _judge("state folder", not is_open, detail, f"chmod go= {home}")
    secrets = home / "secrets"
    if not secrets.is_dir():
        yield Check("secrets", "skip", f"{secrets} does not exist")
        return
    try:
        open_to_others = [path for path in (secrets, *sorted(secrets.rglob("*"))) if _mode(path) & OTHERS]
    except OSError as error:
        yield Check("secrets", "fail", f"can't read {secrets}: {error.strerror}", "run this as the folder's owner")
        return
    names = ", ".join(f"{path} ({_mode(path):04o})" for path in open_to_others)
    yield _judge(
        "secrets",
        not open_to_others,
        f"others may read {names}" if open_to_others else "readable by their owner only",
        f"chmod -R go= {secrets}",
    )


def run_checks(home: Path) -> Iterator[Check]:
    """Checks that a running service's sockets are closed to other users, and its metrics to other machines."""
    import psutil

    from serve_app.local_run import find_run

    run = find_run(home)
    if run is None:
        yield from _skipped(f"no service runs on {home}", "sockets", "ports")
        return
    try:
        reached = [path for path in (run.folder, run.session.parent) if is_open_to_others(path)]
        reached += [path for path in run.haproxy_files("admin.sock") if _mode(path) & OTHERS]
        served = [f"{host}:{port}" for host, port in _open_ports(run.launcher) if _has_metrics(host, port)]
    except (OSError, psutil.Error) as error:
        yield from _skipped(f"{error}; run this as the owner of the service", "sockets", "ports")
        return
    yield _judge(
        "sockets",
        not reached,
        f"other users can reach {', '.join(map(str, reached))}" if reached else "closed to other users",
        "restart the service with a release that closes its sockets",
    )
    yield _judge(
        "ports",
        not served,
        f"other machines can read metrics on {', '.join(served)}" if served else "only this machine can read metrics",
        "restart the service without SERVE_APP_HAPROXY_HOST and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, or use a firewall",
    )


def _open_ports(launcher: int) -> list[tuple[str, int]]:
    """Returns the addresses and ports on which a process of the service accepts connections from other machines."""
    import psutil

    parent = psutil.Process(launcher)
    found: set[tuple[str, int]] = set()
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found |= {(one.ip, one.port) for one in listening if not is_loopback(one.ip)}
    return sorted(found)


def _has_metrics(host: str, port: int) -> bool:
    """Returns whether the port serves metrics without a token."""
    import httpx

    address = ip_address(host)
    reachable = "127.0.0.1" if address.is_unspecified else f"[{host}]" if address.version == 6 else host
    try:
        return httpx.get(f"http://{reachable}:{port}/metrics", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:  # the port does not speak HTTP
        return False


def service_checks(client: AdminClient, connection: Connection) -> Iterator[Check]:
    """Checks the address, the open routes, the operator key, every identifier, and the ledger."""
    health = _attempt("address", lambda: client.probe("/health"), "start the service (`make serve`) or set --url")
    if isinstance(health, Check):
        yield health
        yield from _skipped("the service can't be reached", "health", "ready", "operator key", "models", "ledger")
        return
    status, seconds = health
    yield Check("address", "ok", connection.url)
    yield _judge("health", status == 200, f"{status} in {seconds * 1000:.0f} ms", LOG)
    ready = _attempt("ready", lambda: client.probe("/ready"), LOG)
    if not isinstance(ready, Check):
        hint = f"no replica is ready yet: wait, then {LOG}"
        ready = _judge("ready", ready[0] == 200, str(ready[0]), hint)
    yield ready
    models = _attempt("operator key", lambda: client.api_get("models"), "pass the correct key with --operator-key-file")
    if isinstance(models, Check):
        yield models
        yield from _skipped("the operator key is not accepted", "models", "ledger")
        return
    yield Check("operator key", "ok", "accepted")
    yield from model_checks(models)
    # This call makes one step from the last checkpoint, in a few seconds. A complete check may take too long.
    report = _attempt("ledger", lambda: client.api_get("ledger", "check"), LOG)
    if not isinstance(report, Check):
        so_far = " so far; run `serve-app ledger check` for the rest" if report.get("next") else ""
        detail = f"{report['entries']:,} journal entries, {len(report['problems'])} problems{so_far}"
        sound = not report["problems"] and (report["ok"] or bool(so_far))
        report = _judge("ledger", sound, detail, "run `serve-app ledger check` for the problems")
    yield report


def model_checks(models: Json) -> Iterator[Check]:
    """Checks that each identifier has a backend with a weight above 0 and at least one replica."""
    if not models["data"]:
        yield Check("models", "fail", "no model is configured", "add one to the gateway's user_config")
    for model in models["data"]:
        states = ", ".join(f"{b['name']} {b['status']} × {b['replicas']}" for b in model["backends"])
        served = any(b["weight"] > 0 and (b["replicas"] or 0) > 0 for b in model["backends"])
        hint = "check the backend's log; a replica needs up to a minute to load"
        yield _judge(f"model {model['id']}", served, states or "no backend", hint)


def _memory() -> Check:
    import psutil

    free = psutil.virtual_memory().available / GIB
    hint = "stop other programs, or serve a smaller model"
    return _judge("memory", free >= MIN_MEMORY_GIB, f"{free:.1f} GiB free, {MIN_MEMORY_GIB:.0f} needed", hint)


def _disk(home: Path) -> Check:
    existing = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    hint = f"free some space on the disk of {existing}"
    return _judge("disk", free >= MIN_DISK_GIB, f"{free:.1f} GiB free, {MIN_DISK_GIB:.0f} needed", hint)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _attempt(name: str, call: Callable[[], T], hint: str) -> T | Check:
    try:
        return call()
    except CommandError as failure:
        return Check(name, "fail", failure.message, hint)


def _skipped(reason: str, *names: str) -> Iterator[Check]:
    for name in names:
        yield Check(name, "skip", reason)


def _judge(name: str, passed: bool, detail: str, hint: str) -> Check:
    return Check(name, "ok", detail) if passed else Check(name, "fail", detail, hint)
