"""The driver process and all that comes of it: started as a family, ended as a family, by process id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes orphaned descendants this process's children (Linux), so that none can be lost when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _follow_parent() -> None:
    """In the child: be told to stop when the launcher is killed, and be out of reach of the terminal's Ctrl-C."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Family:
    """One driver with all its descendants."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.driver = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_follow_parent,
            )

    def exit_code(self) -> int | None:
        """None while the driver runs."""
        return self.driver.poll()

    def last_lines(self, count: int = 5) -> str:
        """The end of the driver's output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-count:])
        return ""

    def stop(self, within_s: float, report: Callable[[str], None]) -> None:
        """Asks the driver to shut down in order; ends by id whatever is left after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(max(0.1, within_s - 3))
        for ask, patience in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 2.0)):
            left = self._descendants()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ask(process)
            psutil.wait_procs(left, timeout=max(0.2, min(patience, deadline - time.monotonic())))
        if left := self._descendants():
            report(f"still running: {', '.join(str(process.pid) for process in left)}")

    def _descendants(self) -> list[psutil.Process]:
        """Everything below this process that still runs; as its subreaper, orphans too. Reaps what has ended."""
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
