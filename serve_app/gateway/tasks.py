"""Background tasks that outlive the request that started them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("ray.serve")

_running: set[asyncio.Task[Any]] = set()
_endless: set[asyncio.Task[Any]] = set()


def detached(coroutine: Coroutine[Any, Any, Any], *, endless: bool = False) -> asyncio.Task[Any]:
    """Runs `coroutine` in a context of its own; a failure that nobody awaits is logged.

    In the context of a request, Ray Serve would cancel its calls together with the request. `finished` does not wait
    for what is `endless`.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
    (_endless if endless else _running).add(task)  # the loop itself keeps only a weak reference
    task.add_done_callback(_ended)
    return task


async def finished(timeout_s: float) -> bool:
    """Waits for the background tasks of this loop, those that they start too; False when some still run then."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while running := [task for task in _running if task.get_loop() is loop]:
        if (left := deadline - loop.time()) <= 0:
            return False
        await asyncio.wait(running, timeout=left)
    return True


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    _endless.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the gateway failed", exc_info=error)
