"""Calls between processes of one machine over a socket: a tenth of what a call through Serve costs.

Frames in both directions are a length (4 bytes) and a pickle: (number, method, arguments) and (number, answer, error).
The socket has a random name in Linux's abstract namespace, which no file outlives, and both ends take only processes
of the same user: whoever may send a pickle may run code. Where there are no such sockets a server has no address, and
callers stay with Serve's own calls (see line.py).
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
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.tasks import detached

logger = logging.getLogger("ray.serve")

MOST_BYTES: Final = 256 * 1024 * 1024  # of one frame: what is longer is no frame of ours
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group

Methods = Mapping[str, Callable[..., Awaitable[Any]]]


class _Frames(asyncio.Protocol, ABC):
    """One connection: bytes to frames and back."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        """Refuses other users' processes."""
        if not _same_user(transport):
            logger.error("a process of another user was refused at a socket of this service")
            transport.abort()
            return
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Takes whole frames out of what has come."""
        if self._transport is None:
            return
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer)
            if length > MOST_BYTES:
                self.close()
                return
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            self.received(frame)

    @abstractmethod
    def received(self, frame: Any) -> None:
        """A whole frame has come."""

    def send(self, frame: Any) -> None:
        """Sends a frame, or nothing when the other side is gone."""
        if self._transport is not None:
            raw = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(raw)) + raw)

    @property
    def is_open(self) -> bool:
        """Whether the other side is there, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.abort()


class _Served(_Frames):
    """The answering end."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def connection_made(self, transport: Any) -> None:
        """Can be ended by the server from here on."""
        super().connection_made(transport)
        if self._server.closed:  # it was accepted before
            self.close()
        else:
            self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Answers that are still due go nowhere."""
        super().connection_lost(exc)
        self._server.connections.discard(self)

    def received(self, frame: Any) -> None:
        """Calls do not wait for one another."""
        detached(self._answer(*frame))

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer, error = await self._server.methods[method](*arguments), None
        except Exception as raised:
            answer, error = None, raised
        try:
            self.send((number, answer, error))
        except Exception as unsendable:  # an exception, most likely, that can't be pickled
            self.send((number, None, RuntimeError(f"{method}: {type(unsendable).__name__}: {unsendable}: {error!r}")))


class Connection(_Frames):
    """The asking end: any number of calls at once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._retired = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """The method's answer. Raises what it raises, and Unavailable when the other side goes away meanwhile.

        A caller that gives up does not stop the other side.
        """
        if not self.is_open:
            raise Unavailable("the connection is closed")
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self.send((number, method, arguments))
            return await future
        finally:
            del self._open[number]
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """Closes the connection as soon as nobody waits for an answer."""
        self._retired = True
        if not self._open:
            self.close()

    def received(self, frame: Any) -> None:
        """An answer goes to the call that asked, if it still waits."""
        number, answer, error = frame
        future = self._open.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for an answer that can't come."""
        super().connection_lost(exc)
        for future in self._open.values():
            if not future.done():
                future.set_exception(Unavailable("the other side has closed the connection"))


class Server:
    """Answers calls of `methods` from the first time on that somebody asks for its address."""

    def __init__(self, methods: Methods) -> None:
        self.methods = methods
        self.connections: set[_Served] = set()
        self.closed = False
        self._starting = asyncio.Lock()
        self._listener: asyncio.AbstractServer | None = None
        self._address = f"serve-app-{uuid.uuid4().hex}"

    async def address(self) -> str | None:
        """What `connect` takes; None where there are no such sockets, and when it is closed."""
        if sys.platform != "linux" or self.closed:
            return None
        async with self._starting:
            if self._listener is None:
                loop = asyncio.get_running_loop()
                self._listener = await loop.create_unix_server(lambda: _Served(self), f"\0{self._address}")
        return self._address

    def close(self) -> None:
        """Ends all connections and takes no more."""
        self.closed = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()


async def connect(address: str) -> Connection | None:
    """A connection to the server of this address; None when there is no such address on this machine."""
    if sys.platform != "linux":
        return None
    # By hand: uvloop takes only paths in the file system here. On one machine nothing of this waits.
    end = socket.socket(socket.AF_UNIX)
    end.setblocking(False)
    try:
        end.connect(f"\0{address}")
        _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, sock=end)
    except OSError:
        end.close()
        return None
    return connection if connection.is_open else None


def _same_user(transport: asyncio.Transport) -> bool:
    end = transport.get_extra_info("socket")
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
