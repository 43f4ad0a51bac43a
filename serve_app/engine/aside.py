"""Work that takes long, beside the engine: few threads that yield to it, one job of a tenant at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        """Its result, or its exception."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _yield_to_others() -> None:
    with contextlib.suppress(OSError):  # Linux: of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
