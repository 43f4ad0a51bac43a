"""A server's processes: started, paused, measured and ended together, by process id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


class Tree:
    """One process with all its descendants."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, cwd: Path, *, piped: bool) -> None:
        self.log = log
        self._seen: set[psutil.Process] = set()  # psutil compares id and start time, because ids may be reused
        self._paused: list[psutil.Process] = []
        with log.open("ab") as output:
            self.root = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output if piped else subprocess.STDOUT,
                text=True,
                preexec_fn=end_with_parent,
            )

    def processes(self) -> list[psutil.Process]:
        """Returns the processes that run now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.root.pid)
            self._seen.update([root, *root.children(recursive=True)])
        return [process for process in self._seen if _runs(process)]

    def cpu_s(self) -> float:
        """Processor seconds used so far by the running processes."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def busy(self, over_s: float) -> float:
        """Processor seconds per second during the next `over_s` seconds."""
        before, began = self.cpu_s(), time.perf_counter()
        time.sleep(over_s)
        return max(0.0, self.cpu_s() - before) / (time.perf_counter() - began)

    def memory(self) -> int:
        """Memory in bytes: proportional set sizes, which count shared pages once; if unknown, resident sizes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                try:
                    total += process.memory_full_info().pss
                except (psutil.AccessDenied, AttributeError):
                    total += process.memory_info().rss
        return total

    def pause(self) -> None:
        """Suspends all processes. Otherwise, an idle server that polls would disturb the server that is measured."""
        self._paused = self.processes()
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Continues the paused processes."""
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._paused = []

    def stop(self, patience_s: float) -> None:
        """Sends SIGINT to the root, and waits up to `patience_s` for its end.

        Then sends SIGTERM and, after that, SIGKILL to the remaining processes.
        """
        self.resume()
        running = self.processes()
        if self.root.poll() is None:
            self.root.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.root.wait(patience_s)
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            left = [process for process in {*running, *self.processes()} if _runs(process)]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ask(process)
            psutil.wait_procs(left, timeout=3)
        self.root.wait(5)

    def last_lines(self, count: int = 5) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-count:])


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Protects this new child process from Ctrl-C. On Linux, it gets signal `number` when its parent dies."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
