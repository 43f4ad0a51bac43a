"""Runs long jobs next to the engine, on a few low-priority threads, one job per tenant at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")

_THREADS = 2
_NICENESS = 10  # low priority: a job may take a second, and the engine needs the processor every few ms


class Aside:
    """A background executor for one event loop.

    After a tenant's job, the tenant pauses for `rest` times the job's duration before its next job begins. So one
    tenant uses at most 1 / (1 + `rest`) of a core. `clock` returns seconds.
    """

    def __init__(self, name: str, rest: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rest = rest
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name, initializer=_yield_to_others)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant

    async def run(self, tenant: str, job: Callable[[], Result]) -> Result:
        """Run a job and return its result, or raise its exception.

        If the caller is cancelled while the job runs, the job continues, and the tenant's next job waits until it ends.
        """
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        await turn.acquire()

        took_s = 0.0

        def timed() -> Result:
            nonlocal took_s
            began = self._clock()
            try:
                return job()
            finally:
                took_s = self._clock() - began

        def ended(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before the job ended
                loop.call_soon_threadsafe(loop.call_later, self._rest * took_s, turn.release)

        try:
            running = self._threads.submit(timed)
        except BaseException:
            turn.release()
            raise
        running.add_done_callback(ended)
        # Cancelling the caller cancels a job that has not started; a running job cannot be cancelled.
        return await asyncio.wrap_future(running)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job that does not wait for a tenant's turn. Unlike `run`, this needs no event loop."""
        return self._threads.submit(job)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _yield_to_others() -> None:
    with contextlib.suppress(OSError):  # on Linux, this changes only this thread's priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
