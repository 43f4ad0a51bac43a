"""Joins calls that arrive while one is in flight: each hop costs the same for one request and for fifty.

At most one call is in flight; what arrives meanwhile goes in the next as one list, in order of arrival. One client sees
no delay, many share the cost (`python -m bench.gateway` measures it).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from serve_app.gateway.tasks import detached

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Unavailable(Exception):
    """The other side could not be reached or did not answer; whether the call took effect is unknown."""


class Coalescer(Generic[Ask, Answer]):
    """Calls `send` with lists of asks, one list at a time. Answers come in the order of the asks.

    A failing or silent call fails the asks of its own list with Unavailable and no others.
    """

    def __init__(
        self, send: Callable[[list[Ask]], Awaitable[Sequence[Answer]]], *, timeout_s: float, most: int = 256
    ) -> None:
        self._send = send
        self.timeout_s = timeout_s
        self._most = most
        self._waiting: list[tuple[Ask, asyncio.Future[Answer]]] = []
        self._drain: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, ask: Ask, *, company_s: float = 0.0) -> asyncio.Future[Answer]:
        """Queues `ask`. Cancelling the future does not take the ask back.

        One that nobody waits for may stay for `company_s` seconds to go together with the next.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((ask, future))
        if self._drain is not None and not self._drain.done():
            return future
        if company_s <= 0:
            self._begin()
        elif self._timer is None:
            self._timer = loop.call_later(company_s, self._begin, context=contextvars.Context())
        return future

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drain is None or self._drain.done():
            # A context of its own: in the caller's, the call would be cancelled together with the caller's request,
            # and everybody else's asks with it.
            self._drain = detached(self._run())

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                async with asyncio.timeout(self.timeout_s):
                    answers = await self._send([ask for ask, _ in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(answers)} answers to {len(batch)} asks")
            except BaseException as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(Unavailable(f"{type(error).__name__}: {error}"))
                        future.exception()  # an ask that nobody awaits any more must not be logged as lost
                if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                    raise
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
