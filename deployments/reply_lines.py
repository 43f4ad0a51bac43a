"""Brings the events of replies from replicas to gateways: one connection for each pair of processes.

A call over Serve chooses the replica, counts as long as the reply runs, and reports failures. The events do not travel
over it, because each of them would cost a quarter of a millisecond. A replica sends all events of a step to a gateway
in one frame: its length (4 bytes), and an array of (number of the reply, event) in MessagePack.

On one machine, connections are sockets in Linux's abstract namespace, so no file is left behind. Both ends accept only
processes of the same user. Other machines connect over TCP, with the cluster's certificates if it has them. A
connection begins with a token, which the gateway passes with each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import ssl
import struct
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from deployments.transport import is_same_user
from serve_app.contracts.generation import BackendEvent, Finished, Rejected
from serve_app.contracts.inbox import Turns

logger = logging.getLogger("ray.serve")

MAX_BYTES: Final = 256 * 1024 * 1024  # of one frame
FULL_BYTES: Final = 1024 * 1024  # a frame of several events that is longer is split
CONNECT_S: Final = 5.0
_LENGTH: Final = struct.Struct("!I")
_IS_LINUX: Final = sys.platform == "linux"
#: None in place of an event: no more events of this reply follow, although it is not complete.
_Frame = list[tuple[int, BackendEvent | None]]
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Frame)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway listens. An empty `host`: only on its own machine, at `name` in the abstract namespace."""

    name: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where a replica sends the events of a reply."""

    address: Address
    number: int  # of the reply, at this address


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Lets a connection to another machine end 15 s after that machine has fallen silent."""
    end = transport.get_extra_info("socket")
    if end.family == socket.AF_UNIX:
        return
    options = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 15_000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # on Linux
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cluster_tls() -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Returns the contexts of a server and of a client with Ray's certificates; None if Ray does not use TLS.

    As in Ray, both sides present a certificate of the cluster's authority, and that of the server names its address.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    authority = os.environ["RAY_TLS_CA_CERT"]
    certificate = os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"]
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority)
        context.load_cert_chain(*certificate)
        made.append(context)
    return made[0], made[1]


class OpenReply:
    """A reply whose events arrive at `take`. `over` is done when no more of them follow."""

    def __init__(self, number: int, take: Callable[[BackendEvent], None]) -> None:
        self.number = number
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False  # an event has arrived
        self.is_complete = False  # its last event has arrived
        self._take = take

    def arrived(self, events: list[BackendEvent | None]) -> None:
        self.has_begun = True
        for event in events:
            if event is not None:
                self._take(event)
            if event is None or isinstance(event, Finished | Rejected):
                self.is_complete = event is not None
                self.end()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class ReplyListener:
    """Accepts the connections of replicas. With a `host`, also those of other machines."""

    def __init__(self, host: str = "") -> None:
        self.replies: dict[int, OpenReply] = {}
        self.connections: set[_Incoming] = set()
        self.token = secrets.token_hex(32)
        self._host = host if host or _IS_LINUX else "127.0.0.1"
        self._name = f"serve-app-replies-{secrets.token_hex(16)}"
        self._numbers = itertools.count()
        self._servers: list[asyncio.AbstractServer] = []
        self._address: Address | None = None
        self._starting = asyncio.Lock()

    async def open(self, take: Callable[[BackendEvent], None]) -> tuple[OpenReply, ReplyTo]:
        """Returns a reply, and where its replica sends the events. `close` it at its end."""
        address = self._address or await self._start()
        reply = OpenReply(next(self._numbers), take)
        self.replies[reply.number] = reply
        return reply, ReplyTo(address, reply.number)

    def close_reply(self, reply: OpenReply) -> None:
        """Drops the events of this reply that still arrive."""
        self.replies.pop(reply.number, None)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close()

    async def _start(self) -> Address:
        async with self._starting:
            if self._address is not None:
                return self._address
            loop, port = asyncio.get_running_loop(), 0
            if _IS_LINUX:
                made = await loop.create_unix_server(lambda: _Incoming(self, is_local=True), f"\0{self._name}")
                self._servers.append(made)
            if self._host:
                tls = cluster_tls()
                listener = await loop.create_server(
                    lambda: _Incoming(self, is_local=False), self._host, 0, ssl=None if tls is None else tls[0]
                )
                self._servers.append(listener)
                port = listener.sockets[0].getsockname()[1]
            self._address = Address(self._name, self._host, port, self.token)
            return self._address


class _Incoming(asyncio.Protocol):
    """A replica's connection at the gateway."""

    def __init__(self, listener: ReplyListener, *, is_local: bool) -> None:
        self._listener = listener
        self._is_local = is_local
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_known = False  # it has sent the token
        self._numbers: set[int] = set()  # of the replies of this replica
        self._turns = Turns(asyncio.get_running_loop(), self._hand_out)

    def connection_made(self, transport: Any) -> None:
        if self._is_local and not is_same_user(transport):
            logger.error("a process of another user was refused at a socket of this service")
            transport.abort()
            return
        self._transport = transport
        keep_alive(transport)
        self._listener.connections.add(self)
        asyncio.get_running_loop().call_later(CONNECT_S, self._expect_token)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._listener.connections.discard(self)
        for number in self._numbers:
            if (reply := self._listener.replies.get(number)) is not None:
                reply.end()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while size - start >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(buffer, start)
            if length > (MAX_BYTES if self._is_known else 256):
                self.close()
                return
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if size < end:
                break
            frame = bytes(memoryview(buffer)[begin:end])
            start = end
            if self._is_known:
                self._turns.add(_decoder.decode(frame))
            elif hmac.compare_digest(frame, self._listener.token.encode()):
                self._is_known = True
            else:
                logger.error("a connection without the right token was refused")
                self.close()
                return
        if start:
            del buffer[:start]

    def _expect_token(self) -> None:
        if not self._is_known:
            self.close()

    def _hand_out(self, number: int, events: list[BackendEvent | None]) -> None:
        reply = self._listener.replies.get(number)
        if reply is None:  # nobody waits for it any more
            self._numbers.discard(number)
            return
        self._numbers.add(number)
        try:
            reply.arrived(events)
        except Exception:
            logger.exception("an event of a reply could not be taken")
            reply.end()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ReplyLine(asyncio.Protocol):
    """A connection to a gateway, at the replica. Events that are sent in one turn of the loop leave in one frame."""

    def __init__(self, token: str) -> None:
        self.on_lost: set[Callable[[], None]] = set()
        self._token = token
        self._events: list[tuple[int, BackendEvent | None]] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, number: int, event: BackendEvent | None) -> None:
        """Sends an event of a reply; None: no more events follow."""
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append((number, event))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        keep_alive(transport)
        self._write(self._token.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for lost in list(self.on_lost):
            lost()

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._write_events(events)

    def _write_events(self, events: _Frame) -> None:
        data = _encoder.encode(events)
        if len(data) > FULL_BYTES and len(events) > 1:
            half = len(events) // 2
            self._write_events(events[:half])
            self._write_events(events[half:])
        else:
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(_LENGTH.pack(len(data)) + data)


class ReplyLines:
    """The connections of a replica's process, by the gateway's address."""

    def __init__(self) -> None:
        self._lines: dict[Address, asyncio.Task[ReplyLine]] = {}

    async def to(self, address: Address) -> ReplyLine:
        """Returns the open connection, or makes one. Raises OSError if the gateway can't be reached."""
        making = self._lines.get(address)
        if making is None or (making.done() and not _is_usable(making)):
            making = self._lines[address] = asyncio.create_task(_connect(address))
            making.add_done_callback(lambda made: self._forget(address, made))
        return await asyncio.shield(making)

    def _forget(self, address: Address, made: asyncio.Task[ReplyLine]) -> None:
        """Drops a connection when it is lost: a gateway that has ended does not come back under its address."""

        def drop() -> None:
            if self._lines.get(address) is made:
                del self._lines[address]

        if made.cancelled() or made.exception() is not None:
            drop()
        else:
            made.result().on_lost.add(drop)


_lines: Final = ReplyLines()


async def send_events(events: AsyncGenerator[BackendEvent, None], to: ReplyTo) -> str | None:
    """Sends the events of a reply to its gateway. Closes `events` if the gateway is gone.

    Returns why it ended early, or None. An exception of `events` is raised when the events before it are sent.
    """
    async with contextlib.aclosing(events):
        try:
            line = await _lines.to(to.address)
        except OSError as error:
            return f"the gateway can't be reached at {to.address.host or 'its socket'}: {error}"
        task = asyncio.current_task()
        assert task is not None
        is_lost = is_complete = False

        def lost() -> None:
            nonlocal is_lost
            is_lost = True
            task.cancel()

        line.on_lost.add(lost)
        try:
            async for event in events:
                line.send(to.number, event)
                is_complete = isinstance(event, Finished | Rejected)
        except asyncio.CancelledError:
            await events.aclose()
            if not is_lost or task.uncancel():
                raise
            return "the connection to the gateway is lost"
        finally:
            line.on_lost.discard(lost)
            if not is_complete:
                line.send(to.number, None)
    return None


async def _connect(address: Address) -> ReplyLine:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):  # TimeoutError is an OSError
        if _IS_LINUX:
            # By hand: uvloop accepts only file-system paths here. On one machine none of this blocks.
            end = socket.socket(socket.AF_UNIX)
            end.setblocking(False)
            try:
                end.connect(f"\0{address.name}")
            except OSError:
                end.close()
                if not address.host:
                    raise
            else:
                _, line = await loop.create_unix_connection(lambda: ReplyLine(address.token), sock=end)
                return line
        tls = cluster_tls()
        context, name = (None, None) if tls is None else (tls[1], address.host)
        _, line = await loop.create_connection(
            lambda: ReplyLine(address.token), address.host, address.port, ssl=context, server_hostname=name
        )
        return line


def _is_usable(made: asyncio.Task[ReplyLine]) -> bool:
    return not made.cancelled() and made.exception() is None and made.result().is_open
