"""A network of the drill's own: machines that share nothing but the disk of this one.

Each node has its own network, process ids and /tmp (Linux namespaces), so it has the ports of a real machine, finds no
local socket of another node, and takes all its processes with it when its first one is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

from bench.harness.processes import end_with_parent
from tests.service.chaos.stand import ROOT, StandError

BRIDGE = "drill0"
SUBNET = "10.77.0"
GATE = f"{SUBNET}.1"  # where Redis, the load balancer and the clients are
_INSIDE = "SERVE_APP_DRILL_INSIDE"


def missing(weights: Path, root: Path = ROOT, environment: str = sys.prefix) -> str:
    """Why this machine can't run the drill; empty where it can. `weights` is the folder of the bundled model."""
    needed = {
        "checkout": root,
        "virtual environment": Path(environment),
        "bundled model (SERVE_APP_TEST_HOME)": weights,
    }
    for what, folder in needed.items():
        if any(path.is_relative_to("/tmp") for path in (folder.absolute(), folder.resolve())):
            return f"the {what} is at {folder}, and each node's own /tmp hides it: move it out of /tmp"
    for program in ("unshare", "ip", "redis-server"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian: util-linux, iproute2, redis-server)"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, check=False)
    return "nodes need namespaces: run it as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN" if tried.returncode else ""


def is_inside() -> bool:
    """Returns whether this program already runs in the network."""
    return os.environ.get(_INSIDE) == str(os.getpid())


def enter(arguments: list[str]) -> None:
    """Starts this program again in a new network. Does not return."""
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.service.drill", *arguments]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: str(os.getpid())})


def make() -> None:
    """The network, once inside."""
    del os.environ[_INSIDE]
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "address", "add", f"{GATE}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")


class Machine:
    """One machine's namespaces, with `program` as their first process."""

    def __init__(self, address: str, program: str, environment: Mapping[str, str], temporary: Path, log: Path) -> None:
        """`program` is a line of bash; `temporary` becomes its /tmp."""
        number = address.rpartition(".")[2]
        inside = (
            f"echo up; read -r _; ip link set lo up; ip address add {address}/24 dev eth0; ip link set eth0 up; "
            f"hostname drill-{number}; mount --bind {temporary} /tmp; exec >>{log} 2>&1 </dev/null; {program}"
        )
        command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._outer = subprocess.Popen(
            [*command, "bash", "-c", inside],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # unshare blocks SIGTERM
        )
        assert self._outer.stdin is not None
        assert self._outer.stdout is not None
        self._outer.stdout.readline()
        self._outer.stdout.close()
        # A machine that ends takes its end of the cable with it, and so the other.
        cable = f"drill{number}-{self._outer.pid}"[:15]
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self._first()))
        _run("ip", "link", "set", cable, "master", BRIDGE, "up")
        self._outer.stdin.write("go\n")
        self._outer.stdin.close()

    def _first(self) -> int:
        """The process that is number 1 inside."""
        return int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(self._outer.pid)]).split()[0])

    def running(self) -> bool:
        return self._outer.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """To the first process. SIGKILL ends all others at once (pid_namespaces(7))."""
        if number is signal.SIGKILL:
            self._outer.kill()  # its `--kill-child` ends the first process, also one that has just started or ended
        elif self.running():
            os.kill(self._first(), number)

    def kill(self, pid: int) -> None:
        """SIGKILL to the process with this number inside."""
        for process in psutil.Process(self._outer.pid).children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                [numbers] = [line for line in status.splitlines() if line.startswith("NSpid:")]
                if numbers.split()[-1] == str(pid):
                    process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s`. Returns whether it has ended."""
        try:
            self._outer.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StandError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
