"""Sends messages between processes: over a local socket if the replica is on this machine, else through Serve.

Serve decides which replica is the right one. A message over the socket costs a tenth of a call through Serve. Frames in
both directions are a length (4 bytes) and a pickle: (number, message) and (number, answer, error). The socket has a
random name in Linux's abstract namespace, so no file is left behind. Both ends accept only processes of the same user,
because a process that can send a pickle can run code. On a platform without such sockets, a server has no address and
every message goes through Serve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
import struct
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

from serve_app.contracts.calls import Unavailable, detached

logger = logging.getLogger("ray.serve")

MAX_BYTES: Final = 256 * 1024 * 1024  # maximum size of one frame
CONFIRM_S: Final = 0.4
TRUST_S: Final = 1.2  # after a confirmation; this plus a heartbeat is less than a new limiter waits for open holds
TIMEOUT_S: Final = 1.0  # timeout of a confirmation
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class Line:
    """Sends messages to one replica.

    `by_serve` sends a message through Serve. `find_address` asks the replica, through Serve, for the address of its
    Server; None if it has none.

    Serve remains the authority on which replica is the right one. The line queries the address through Serve about
    twice a second, and does not use a connection that Serve has not confirmed recently. A replica that was replaced may
    live on for a moment, and two limiters must not both decide.
    """

    def __init__(
        self,
        by_serve: Callable[[Any], Awaitable[Any]],
        find_address: Callable[[], Awaitable[str | None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_serve = by_serve
        self._find_address = find_address
        self._clock = clock
        self._address: str | None = None
        self._connection: Connection | None = None
        self._trusted_until = 0.0
        self._confirm_at: float | None = None
        self._confirming: asyncio.Task[None] | None = None

    async def send(self, message: Any) -> Any:
        """Sends a message and returns the answer.

        Raises Unavailable if no answer arrived. It is then unknown whether the message took effect.
        """
        now = self._clock()
        if self._confirm_at is None:
            self._confirm_at = now  # the next message confirms: some lines are used only once
        elif now >= self._confirm_at and (self._confirming is None or self._confirming.done()):
            self._confirm_at = now + CONFIRM_S
            self._confirming = detached(self._confirm())
        connection = self._connection
        if connection is None or not connection.is_open or now >= self._trusted_until:
            return await self._by_serve(message)
        return await connection.send(message)

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
            self._address, self._connection = address, None if address is None else await connect(address)
        self._trusted_until = asked_at + TRUST_S


class Server:
    """Answers messages with `answer`. Starts to listen when a process first asks for its address."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]]) -> None:
        self.answer = answer
        self.connections: set[_Answering] = set()
        self.closed = False
        self._starting = asyncio.Lock()
        self._listener: asyncio.AbstractServer | None = None
        self._address = f"serve-app-{uuid.uuid4().hex}"

    async def address(self) -> str | None:
        """Returns the address for `connect`; None if there are no such sockets or the server is closed."""
        if sys.platform != "linux" or self.closed:
            return None
        async with self._starting:
            if self._listener is None:
                loop = asyncio.get_running_loop()
                self._listener = await loop.create_unix_server(lambda: _Answering(self), f"\0{self._address}")
        return self._address

    def close(self) -> None:
        """Closes all connections and accepts no more."""
        self.closed = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()


async def connect(address: str) -> Connection | None:
    """Connects to the server at this address. Returns None if there is no such address on this machine."""
    if sys.platform != "linux":
        return None
    # Connects by hand, because uvloop accepts only file-system paths here. On one machine none of this blocks.
    end = socket.socket(socket.AF_UNIX)
    end.setblocking(False)
    try:
        end.connect(f"\0{address}")
        _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, sock=end)
    except OSError:
        end.close()
        return None
    return connection if connection.is_open else None


class _Frames(asyncio.Protocol, ABC):
    """One connection. Converts bytes to frames and back."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        if not is_same_user(transport):
            logger.error("a process of another user was refused at a socket of this service")
            transport.abort()
            return
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer)
            if length > MAX_BYTES:
                self.close()
                return
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            self.frame_received(frame)

    @abstractmethod
    def frame_received(self, frame: Any) -> None: ...

    def write_frame(self, frame: Any) -> None:
        """Writes a frame, or nothing if the connection is closed."""
        if self._transport is not None:
            raw = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(raw)) + raw)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Answering(_Frames):
    """The answering end. Messages do not wait for one another."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._server.closed:  # the server accepted the connection before it closed
            self.close()
        else:
            self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.connections.discard(self)

    def frame_received(self, frame: Any) -> None:
        detached(self._answer_frame(*frame))

    async def _answer_frame(self, number: int, message: Any) -> None:
        try:
            answer, error = await self._server.answer(message), None
        except Exception as raised:
            answer, error = None, raised
        try:
            self.write_frame((number, answer, error))
        except Exception as failed:  # most likely an exception that can't be pickled
            text = f"{type(message).__name__}: {type(failed).__name__}: {failed}: {error!r}"
            self.write_frame((number, None, RuntimeError(text)))


class Connection(_Frames):
    """The sending end. Any number of messages can be open at once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._retired = False

    async def send(self, message: Any) -> Any:
        """Sends a message and returns the answer.

        Raises the exception of the other side, or Unavailable if the connection is lost. Cancelling does not stop the
        other side.
        """
        if not self.is_open:
            raise Unavailable("the connection is closed")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.write_frame((number, message))
            return await future
        finally:
            del self._waiting[number]
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """Closes the connection as soon as no message waits for its answer."""
        self._retired = True
        if not self._waiting:
            self.close()

    def frame_received(self, frame: Any) -> None:
        number, answer, error = frame
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the other side has closed the connection"))


def is_same_user(transport: asyncio.Transport) -> bool:
    """Returns whether the process at the other end of a local socket belongs to this process's user."""
    end = transport.get_extra_info("socket")
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
