"""Work that takes long, beside the engine: few threads that yield to it, one job of a tenant at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")

_THREADS = 2
_NICENESS = 10  # a job may take a second, and the engine needs the processor every few milliseconds


class Aside:
    """Belongs to one event loop."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name, initializer=_yield_to_others)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant

    async def run(self, tenant: str, job: Callable[[], Result]) -> Result:
        """Its result, or its exception. The tenant's turn lasts until the job ends, also when its caller goes away."""
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        await turn.acquire()

        def ended(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the job
                loop.call_soon_threadsafe(turn.release)

        try:
            running = self._threads.submit(job)
        except BaseException:
            turn.release()
            raise
        running.add_done_callback(ended)
        # A job that has not begun is cancelled with its caller; one that runs can't be.
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _yield_to_others() -> None:
    with contextlib.suppress(OSError):  # Linux: of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
