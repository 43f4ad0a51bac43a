"""Connections between processes of the service. A frame is a length (4 bytes) and a message in MessagePack.

On one machine, connections are sockets in Linux's abstract namespace, which need no file. Both ends accept only
processes of the same user. Other machines connect over TCP, with the cluster's certificates if it has them. A
connection begins with a token, which a process gets through Serve together with the address.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import secrets
import socket
import ssl
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ray.util import get_node_ip_address

from serve_app.contracts.calls import detached
from serve_app.contracts.messages import set_state

logger = logging.getLogger("ray.serve")

MAX_BYTES: Final = 256 * 1024 * 1024  # of one frame
CONNECT_S: Final = 5.0  # timeout to connect, and to send the token
MAX_STRANGERS: Final = 256  # connections of a listener that have not sent the token yet
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group
_IS_LINUX: Final = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener. With an empty `host`, the listener is only at `name` in the abstract namespace."""

    name: str
    host: str
    port: int
    token: str

    __setstate__ = set_state


def own_host() -> str:
    """Returns the address at which other machines reach this process; empty if there is only one machine."""
    return "" if os.environ.get("SERVE_APP_LOCAL_STATE") == "1" else get_node_ip_address()


class Frames(asyncio.Protocol, ABC):
    """One end of a connection. Divides the received bytes into frames."""

    max_bytes = MAX_BYTES  # of a received frame; a longer frame closes the connection

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        if not _is_same_user(transport):
            logger.error("refused a connection to a socket of this service from another user's process")
            transport.abort()
            return
        _keep_alive(transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while self._transport is not None and size - start >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(buffer, start)
            if length > self.max_bytes:
                self.close()
                return
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if size < end:
                break
            frame = bytes(memoryview(buffer)[begin:end])
            start = end
            self.frame_received(frame)
        if start:
            del buffer[:start]

    @abstractmethod
    def frame_received(self, frame: bytes) -> None: ...

    def write(self, frame: bytes) -> None:
        """Writes a frame, or nothing if the connection is closed."""
        if self._transport is not None:
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection. Drops bytes that have arrived but were not read."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


class Incoming(Frames):
    """A connection at the process that listens. Subclasses get the frames after the token."""

    max_bytes = 256  # maximum of a frame until the token has arrived

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._is_known = False  # the other end has sent the token

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._listener.closed:  # the listener was closed after it accepted this connection
            self.close()
        elif self._transport is not None:
            if self._listener.strangers >= MAX_STRANGERS:
                self._listener.refuse("too many connections without a token")
                self.close()
                return
            self._listener.strangers += 1
            self._listener.connections.add(self)
            asyncio.get_running_loop().call_later(CONNECT_S, self._expect_token)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self in self._listener.connections:
            self._listener.connections.discard(self)
            if not self._is_known:
                self._listener.strangers -= 1

    def frame_received(self, frame: bytes) -> None:
        if self._is_known:
            self.message_received(frame)
        elif hmac.compare_digest(frame, self._listener.token.encode()):
            self._is_known, self.max_bytes = True, MAX_BYTES
            self._listener.strangers -= 1
        else:
            self._listener.refuse("a connection without the right token")
            self.close()

    def _expect_token(self) -> None:
        if not self._is_known:
            self.close()

    @abstractmethod
    def message_received(self, frame: bytes) -> None: ...


class Outgoing(Frames):
    """A connection at the process that connected."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.write(self._token.encode())


class Listener(ABC):
    """Accepts connections after the first call of `address`. With a `host`, other machines can also connect."""

    def __init__(self, host: str = "") -> None:
        self.connections: set[Incoming] = set()
        self.strangers = 0  # connections that have not sent the token yet
        self.closed = False
        self.token = secrets.token_hex(32)
        self._host = host if host or _IS_LINUX else "127.0.0.1"
        self._servers: list[asyncio.AbstractServer] = []
        self._listening: asyncio.Task[Address] | None = None
        self._refused_at = -math.inf

    @abstractmethod
    def incoming(self) -> Incoming:
        """Returns the protocol of a new connection."""

    async def address(self) -> Address:
        """Returns the address for `connect`. The first call starts to listen; after `close`, it raises OSError."""
        listening = self._listening
        if listening is None or (listening.done() and (listening.cancelled() or listening.exception() is not None)):
            if self.closed:
                raise ConnectionAbortedError("this process no longer listens")
            listening = self._listening = detached(self._listen())
        return await asyncio.shield(listening)  # if a caller is cancelled, the listener still starts completely

    def refuse(self, what: str) -> None:
        """Logs that a connection was refused, at most once per second."""
        now = time.monotonic()
        if now - self._refused_at >= 1:
            self._refused_at = now
            logger.error("refused: %s", what)

    def close(self) -> None:
        """Closes all connections and accepts no more."""
        self.closed = True
        self._stop_listening()
        for connection in list(self.connections):
            connection.close()

    async def _listen(self) -> Address:
        loop, port, name = asyncio.get_running_loop(), 0, f"serve-app-{secrets.token_hex(16)}"
        try:
            if self._host:
                tls = cluster_tls()
                secure: dict[str, Any] = {} if tls is None else {"ssl": tls[0], "ssl_handshake_timeout": CONNECT_S}
                server = await loop.create_server(self.incoming, self._host, 0, **secure)
                self._servers.append(server)
                port = server.sockets[0].getsockname()[1]
            if _IS_LINUX:
                self._servers.append(await loop.create_unix_server(self.incoming, f"\0{name}"))
            if self.closed:
                raise ConnectionAbortedError("this process no longer listens")
        except BaseException:
            self._stop_listening()
            raise
        return Address(name, self._host, port, self.token)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()


Made = TypeVar("Made", bound=Outgoing)


async def connect(address: Address, make: Callable[[str], Made]) -> Made:
    """Connects to the listener at this address. `make` gets the token. Raises OSError if it can't be reached."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):  # TimeoutError is an OSError
        if _IS_LINUX:
            # Connects the socket itself, because uvloop accepts only file-system paths. Local sockets do not block.
            end = socket.socket(socket.AF_UNIX)
            end.setblocking(False)
            try:
                end.connect(f"\0{address.name}")
            except OSError:
                end.close()
                if not address.host:
                    raise
            else:
                _, made = await loop.create_unix_connection(lambda: make(address.token), sock=end)
                if made.is_open or not address.host:
                    return _opened(made)
        tls = cluster_tls()
        context, name = (None, None) if tls is None else (tls[1], address.host)
        _, made = await loop.create_connection(
            lambda: make(address.token), address.host, address.port, ssl=context, server_hostname=name
        )
        return _opened(made)


def _opened(made: Made) -> Made:
    if not made.is_open:
        raise ConnectionRefusedError("the process at the other end belongs to another user")
    return made


def cluster_tls() -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Returns the contexts of a server and of a client with Ray's certificates; None if Ray does not use TLS.

    As in Ray, both sides present a certificate of the cluster's authority. The server's certificate contains its
    address.
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


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Makes a connection to another machine end 15 s after that machine has stopped answering."""
    end = transport.get_extra_info("socket")
    if end.family == socket.AF_UNIX:
        return
    options = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 15_000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # only Linux has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Returns whether the process at the other end of a local socket belongs to this process's user."""
    end = transport.get_extra_info("socket")
    if end.family != socket.AF_UNIX:
        return True
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
