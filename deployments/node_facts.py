"""Collects the facts about one node for `serve-app doctor --cluster`, in an actor that runs there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import ray

from serve_app import __version__
from serve_app.settings import GatewayArgs, ModelArgs, home_dir
from serve_app.storage.private_files import is_open_to_others

Facts = dict[str, Any]
# Name of each of Ray's processes, by a part of its command line.
PROCESSES = {
    "gcs_server": "GCS",
    "ray.util.client.server": "client server",
    "dashboard/dashboard.py": "dashboard",
    "dashboard/agent.py": "agent",
    "raylet/raylet": "raylet",
}
FLAGS = ("RAY_SERVE_", "RAY_GRACEFUL_")
CERTIFICATE_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT")
OFFLINE = ("1", "true", "yes", "on")


class Node:
    """The actor. It inherits the environment of `ray start` on its node."""

    def clock(self) -> float:
        return time.time()

    def facts(self, models: Sequence[Facts], gateway_args: Facts | None) -> Facts:
        """Returns the facts about this node.

        `models` are the `args` of model applications, `gateway_args` the `args` of the gateway's application.
        """
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE
        return {
            "flags": {name: value for name, value in os.environ.items() if name.startswith(FLAGS)},
            "versions": {"Ray": version("ray"), "serve-app": __version__, "Python": platform.python_version()},
            "listeners": list(_listeners()),
            "open_paths": list(_open_paths(gateway_args)),
            "tls": _tls(),
            "ledger": _ledger(gateway_args),
            "weights": [_weights(one) | {"offline": offline} for one in models],
            "driver": _driver(),
            "cuda": _cuda(),
        }


def _listeners() -> Iterator[Facts]:
    """Yields the addresses where Ray's processes listen. Leaves out processes that this user may not inspect."""
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            what = next((name for part, name in PROCESSES.items() if part in line), None)
            if what is None:
                continue
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    yield {"what": what, "address": one.laddr[0], "port": one.laddr[1]}
        except psutil.Error:
            continue


def _open_paths(gateway_args: Facts | None) -> Iterator[str]:
    """Yields the paths of Ray, HAProxy and the service that other users of this machine can access."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return  # a container has no other users
    home = (gateway_args or {}).get("home") or home_dir()
    sockets = Path(os.environ.get("RAY_SERVE_HAPROXY_SOCKET_PATH", "/tmp/haproxy-serve/admin.sock"))
    temporary = ray.get_runtime_context().get_temp_dir()
    for path in (Path(home), Path(temporary), *sockets.parent.glob(f"*/{sockets.name}")):
        try:
            if is_open_to_others(path):
                yield str(path)
        except OSError:
            continue


def _tls() -> Facts:
    from serve_app.certificates import ends_at

    used = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    ends: dict[str, float | None] = {}
    for name in CERTIFICATE_FILES if used else ():
        try:
            ends[name] = ends_at(Path(os.environ.get(name, ""))).timestamp()
        except (OSError, ValueError):
            ends[name] = None
    return {"used": used, "ends": ends}


def _ledger(gateway_args: Facts | None) -> Facts | None:
    """Returns the ledger's error, which is empty if it works; None if this node has no ledger address.

    The error never contains the address, because the address may contain a password.
    """
    from serve_app.settings import SettingsError, parse

    try:
        url = parse(GatewayArgs, gateway_args or {}, "args").ledger_url()
    except SettingsError:
        return None
    return {"error": _error(lambda: _expect_head(url))}


def _expect_head(url: str) -> None:
    from serve_app.accounting.database import Database

    database = Database(url)
    try:
        database.expect_head()
    finally:
        database.close()


def _weights(args: Facts) -> Facts:
    return {"model": args.get("model", "bundled"), "error": _error(lambda: _find(args))}


def _find(args: Facts) -> None:
    from serve_app.engine.errors import ModelError
    from serve_app.model.fetch import find
    from serve_app.settings import parse

    settings = parse(ModelArgs, args, "args")
    if settings.model == "bundled":
        return  # replicas prepare it from files that ship with the service
    found = find(settings.model, settings.revision, settings.dtype)
    if found and settings.fingerprint and found != settings.fingerprint:
        raise ModelError(f"the files' fingerprint is {found}, the settings say {settings.fingerprint}")


def _error(attempt: Callable[[], None]) -> str:
    """Returns the first line of the error that `attempt` raises; empty if there is none."""
    try:
        attempt()
    except Exception as error:  # an error in one check must not stop the others
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def _cuda() -> str | None:
    """Returns the CUDA version that torch is built for. Does not import torch, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None
