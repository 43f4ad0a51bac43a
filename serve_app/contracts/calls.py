"""Calls to other processes: shard selection, tasks that outlive a request, and call coalescing."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from serve_app.contracts.errors import LedgerError

logger = logging.getLogger("ray.serve")

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")

_running: set[asyncio.Task[Any]] = set()
_endless: set[asyncio.Task[Any]] = set()


class Unavailable(Exception):
    """The other process could not be reached or did not answer. Whether the call took effect is unknown."""


def boottime() -> float:
    """Returns the seconds of a clock that also runs while this process is stopped or its machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def shard_of(account_id: str, count: int) -> int:
    """Returns the index of an account's shard among `count` shards. It is the same in every process and release."""
    return zlib.crc32(account_id.encode()) % count


def shard_name(deployment: str, index: int) -> str:
    """Returns the name of a shard's deployment: Limiter, Limiter-1, Limiter-2."""
    return deployment if index == 0 else f"{deployment}-{index}"


def detached(coroutine: Coroutine[Any, Any, Any], *, endless: bool = False) -> asyncio.Task[Any]:
    """Runs `coroutine` in a separate context and logs its failure.

    In the context of a request, Ray Serve would cancel the task's calls together with the request.
    `wait_for_background` does not wait for an `endless` task.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
    (_endless if endless else _running).add(task)  # the event loop keeps only a weak reference to a task
    task.add_done_callback(_ended)
    return task


async def repeat(step: Callable[[], Awaitable[Any]], every_s: float, failure: str) -> None:
    """Runs `step` every `every_s` seconds until cancelled. Logs `failure` if `step` raises, and continues."""
    while True:
        try:
            await step()
        except (Unavailable, LedgerError) as error:
            logger.warning("%s: %s", failure, error)
        except Exception:
            logger.exception(failure)
        await asyncio.sleep(every_s)


async def wait_for_background(timeout_s: float) -> bool:
    """Waits for this loop's background tasks and the tasks that they start. Returns False on a timeout."""
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
        logger.error("a background task failed", exc_info=error)


class Coalescer(Generic[Ask, Answer]):
    """Collects asks that arrive while a call is in flight and sends them in the next call, in order of arrival.

    At most one call is in flight. If there is none, an ask is sent at once. So a single client sees no delay, and many
    clients share the cost of a call. Answers are in the order of the asks. A call that fails or exceeds `timeout_s`
    fails only the asks that it carries, with Unavailable.
    """

    def __init__(
        self, send: Callable[[list[Ask]], Awaitable[Sequence[Answer]]], *, timeout_s: float, most: int = 256
    ) -> None:
        self._send = send
        self.timeout_s = timeout_s
        self._most = most
        self._waiting: list[tuple[Ask, asyncio.Future[Answer]]] = []
        self._sending: asyncio.Task[None] | None = None

    def submit(self, ask: Ask) -> asyncio.Future[Answer]:
        """Queues `ask`. Cancelling the future withdraws the ask, unless it has been sent."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, future))
        if self._sending is None or self._sending.done():
            # In the caller's context, cancelling the caller's request would cancel this call and other callers' asks.
            self._sending = detached(self._send_waiting())
        return future

    def fail_waiting(self, reason: str) -> None:
        """Fails unsent asks with Unavailable."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            _fail(future, reason)

    async def _send_waiting(self) -> None:
        while self._waiting:
            # Skip abandoned asks: no caller waits for their answers.
            wanted = [(ask, future) for ask, future in self._waiting if not future.done()]
            batch, self._waiting = wanted[: self._most], wanted[self._most :]
            if not batch:
                return
            try:
                async with asyncio.timeout(self.timeout_s):
                    answers = await self._send([ask for ask, _ in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(answers)} answers to {len(batch)} asks")
            except BaseException as error:
                for _, future in batch:
                    _fail(future, f"{type(error).__name__}: {error}")
                if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                    raise
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def application_of(backend: str) -> str:
    """Returns the Serve application of a backend. `application:adapter` names one of its adapters."""
    return backend.partition(":")[0]


def adapter_of(backend: str) -> str:
    """Returns the adapter that a backend names, or an empty string."""
    return backend.partition(":")[2]


def _fail(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(Unavailable(reason))
        future.exception()  # marks it as retrieved: asyncio must not log an abandoned ask
