"""Calls to the limiter and to accounting, over direct connections.

A call through Serve costs a quarter of a millisecond or more. So Serve only chooses the process, and later calls use a
direct connection to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from deployments.transport import Address, Incoming, Listener, Outgoing, connect
from serve_app.contracts import encoding
from serve_app.contracts.calls import Unavailable, detached

logger = logging.getLogger("ray.serve")

CONFIRM_S: Final = 0.4  # minimum time between two confirmations
# Seconds for which a connection is used after a confirmation. A new limiter waits longer than this plus a heartbeat
# before it admits (RECOVERY_S).
TRUST_S: Final = 1.2
TIMEOUT_S: Final = 1.0  # timeout of a confirmation
ANSWERS_S: Final = 3.0  # maximum wait for the answers to open calls when a process ends


class Line:
    """Sends calls to one replica.

    `by_serve` sends a call through Serve. `find_address` asks the replica, through Serve, for the address of its
    Server, and returns None if the replica has no Server.

    Serve remains the authority on which replica to use. A replica that was replaced may live on for a moment, and two
    limiters must not both decide. So the line queries the address through Serve about twice a second, and uses only a
    connection that was confirmed recently.
    """

    def __init__(
        self,
        by_serve: Callable[[Any], Awaitable[Any]],
        find_address: Callable[[], Awaitable[Address | None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_serve = by_serve
        self._find_address = find_address
        self._clock = clock
        self._address: Address | None = None
        self._connection: Connection | None = None
        self._trusted_until = 0.0
        self._confirm_at: float | None = None
        self._confirming: asyncio.Task[None] | None = None

    async def send(self, call: Any) -> Any:
        """Sends a call and returns the answer.

        Raises Unavailable if no answer arrived. It is then unknown whether the call took effect.
        """
        now = self._clock()
        if self._confirm_at is None:
            self._confirm_at = now  # the first call does not confirm, because some lines are used only once
        elif now >= self._confirm_at and (self._confirming is None or self._confirming.done()):
            self._confirm_at = now + CONFIRM_S
            self._confirming = detached(self._confirm())
        connection = self._connection
        if connection is None or not connection.is_open or now >= self._trusted_until:
            return await self._by_serve(call)
        try:
            return await connection.send(call)
        except encoding.Unreadable as error:
            logger.debug("a call goes through Serve: %s", error)
            return await self._by_serve(call)

    async def _confirm(self) -> None:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                address = await self._find_address()
        except Exception:  # unreachable, or a release without addresses
            address = None
        connection = self._connection
        if connection is None or not connection.is_open or address != self._address:
            if connection is not None:
                connection.retire()
            self._address, self._connection = address, None
            if isinstance(address, Address):  # an earlier release answers with a string
                try:
                    self._connection = await connect(address, Connection)
                except OSError as error:
                    logger.debug("calls go through Serve: %s", error)
        self._trusted_until = asked_at + TRUST_S


class Server(Listener):
    """Answers calls with `answer`."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]], host: str = "") -> None:
        super().__init__(host)
        self.answer = answer
        self.answering: set[asyncio.Task[None]] = set()

    async def finish(self, timeout_s: float) -> None:
        """Waits until the open calls are answered, at most `timeout_s` seconds. Serve itself does not wait for them."""
        if self.answering:
            await asyncio.wait(set(self.answering), timeout=timeout_s)

    def incoming(self) -> Incoming:
        return _Answering(self)


class _Answering(Incoming):
    """The answering end of a connection. Answers calls concurrently."""

    _listener: Server

    def message_received(self, frame: bytes) -> None:
        task = detached(self._answer(*encoding.decode_call(frame)))
        self._listener.answering.add(task)
        task.add_done_callback(self._listener.answering.discard)

    async def _answer(self, number: int, is_list: bool, items: list[Any]) -> None:
        try:
            answer = await self._listener.answer(encoding.call_of(is_list, items))
        except Exception as error:
            self.write(encoding.encode_error(number, error))
            return
        try:
            frame = encoding.encode_answer(number, answer, is_list=is_list)
        except Exception as error:
            logger.exception("an answer to %s can't be sent", items[0][0])
            frame = encoding.encode_error(number, Unavailable(f"the answer can't be sent: {error}"))
        self.write(frame)


class Connection(Outgoing):
    """The calling end of a connection. Any number of calls can be open at once."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._retired = False

    async def send(self, call: Any) -> Any:
        """Sends a call and returns the answer.

        Raises the error of the other side, or Unavailable if the connection is lost. Cancelling this does not cancel
        the call at the other side.
        """
        if not self.is_open:
            raise Unavailable("the connection is closed")
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = call, future
        try:
            self.write(encoding.encode_call(number, call))
            return await future
        finally:
            del self._waiting[number]
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """Closes the connection once no call waits for its answer."""
        self._retired = True
        if not self._waiting:
            self.close()

    def frame_received(self, frame: bytes) -> None:
        number, error, answer = encoding.decode_answer(frame)
        call, future = self._waiting.get(number, (None, None))
        if future is None or future.done():
            return
        try:
            future.set_result(encoding.answer_to(call, error, answer))
        except Exception as raised:
            future.set_exception(raised)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the other side has closed the connection"))
