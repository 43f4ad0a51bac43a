"""Processes of the attackers and of the control (see `burner`), separate from the clients that measure.

They have no command line: only this benchmark can start them, against the service that it has started.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from bench.attack import hostile
from bench.attack.connections import Tally
from bench.harness.servers import ServerError
from deployments.priority import YIELDING

PREPARE_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Ran:
    """How long a process ran, its processor time, and what it counted."""

    seconds: float
    cpu_s: float
    tally: dict[str, Any]

    @property
    def share(self) -> float:
        """Returns the processor time as a share of all the machine's cores."""
        return self.cpu_s / self.seconds / cores()


def cores() -> int:
    """Returns the number of cores that this benchmark may use."""
    return len(os.sched_getaffinity(0))


def more_files() -> int:
    """Raises the limit of open files to the maximum allowed. Returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Hostile:
    """A process that prepares its work, waits for `begin`, works for the given seconds and reports."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    async def ready(self) -> None:
        """Waits until the process is prepared. Raises ServerError."""
        await self._receive(PREPARE_S)

    def begin(self, seconds: float) -> None:
        """Makes the process work for `seconds`."""
        self._pipe.send(seconds)

    async def ran(self, patience_s: float) -> Ran:
        """Returns the report. Raises ServerError if there is none within `patience_s`."""
        found = await self._receive(patience_s)
        assert isinstance(found, Ran)
        return found

    def stop(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.join(5)
        self._pipe.close()

    async def _receive(self, within_s: float) -> object:
        if not await asyncio.to_thread(self._pipe.poll, within_s):
            raise ServerError("an attacker's process does not respond")
        try:
            return self._pipe.recv()
        except EOFError:
            raise ServerError("an attacker's process has ended; its error is above") from None


def attacker(name: str, target: hostile.Target) -> Hostile:
    """Starts the process of an attack."""
    return Hostile(_attack, name, target)


def burner(share: float) -> Hostile:
    """Starts the control, which only uses processor time: the attacker's `share` of the machine, at most one core."""
    return Hostile(_burn, share * cores())


def _child(pipe: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must only reach the benchmark, which ends this process
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, YIELDING)  # low: a real attacker uses no processor time of this machine
    more_files()
    work(pipe, *arguments)


def _attack(pipe: Connection, name: str, target: hostile.Target) -> None:
    import uvloop

    tally = Tally()
    strategy = hostile.ATTACKS[name].prepare(target, tally)
    pipe.send("ready")
    seconds = pipe.recv()
    began, cpu = time.monotonic(), time.process_time()
    uvloop.run(hostile.run(strategy, seconds))
    found = {field: getattr(tally, field) for field in Tally.__slots__ if field != "open_now"}
    found["statuses"] = dict(tally.statuses)
    pipe.send(Ran(time.monotonic() - began, time.process_time() - cpu, found))


def _burn(pipe: Connection, core_share: float) -> None:
    pipe.send("ready")
    seconds = pipe.recv()
    began, cpu = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        if time.process_time() - cpu < core_share * passed:
            sum(range(2000))
        else:
            time.sleep(0.001)
    pipe.send(Ran(passed, time.process_time() - cpu, {}))
