"""A TCP proxy in front of PostgreSQL that hangs, resets or delays, as networks and load balancers do.

It runs on a loop and a thread of its own, so that tests with and without a loop can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from sqlalchemy.engine import URL, make_url


class Proxy:
    """Forwards connections on a port of 127.0.0.1 to a server. Its methods may be called from any thread.

    `target` is the folder of a PostgreSQL server's Unix socket, or (host, port).
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self._target = target
        self._links: set[_Link] = set()
        self._silent = False  # for connections that are opened from now on
        self._resetting = False
        self.delay_s = 0.0  # of each piece, in both directions
        self.accepted = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def url_of(self, url: str | URL) -> URL:
        """The ledger's URL by way of this proxy."""
        direct = make_url(url)
        query = {name: value for name, value in direct.query.items() if name not in ("host", "port")}
        return direct.set(host="127.0.0.1", port=self.port, query=query)

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def fall_silent(self) -> None:
        """From now on nothing is forwarded and nothing is closed; new connections are accepted and as silent."""
        self._run(self._set_silent, True)

    def pass_new_connections(self) -> None:
        """Forwards connections that are opened from now on. The others stay silent, as after a failover."""
        self._silent = False

    def recover(self) -> None:
        """Forwards everything again: what was withheld first."""
        self._run(self._set_silent, False)
        self._resetting, self.delay_s = False, 0.0

    def reset(self) -> None:
        """Resets all connections, and new ones when they are opened, until `recover`."""
        self._resetting = True
        self._run(self._reset)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        self._reset()
        while self._links:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._resetting:
            _reset(writer)
            return
        link = _Link(self, self._silent)
        self._links.add(link)
        try:
            await link.run(reader, writer)
        finally:
            self._links.discard(link)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, str):
            return await asyncio.open_unix_connection(f"{self._target}/.s.PGSQL.5432")
        return await asyncio.open_connection(*self._target)

    def _set_silent(self, silent: bool) -> None:
        self._silent = silent
        for link in self._links:
            link.set_silent(silent)

    def _reset(self) -> None:
        for link in list(self._links):
            link.reset()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def _run(self, function: Any, *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self._call(call())


class _Link:
    """One client's connection and the one to the server."""

    def __init__(self, proxy: Proxy, silent: bool) -> None:
        self._proxy = proxy
        self._forwards = asyncio.Event()
        self.set_silent(silent)
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    def set_silent(self, silent: bool) -> None:
        if silent:
            self._forwards.clear()
        else:
            self._forwards.set()

    def reset(self) -> None:
        for writer in self._writers:
            _reset(writer)
        for pump in self._pumps:
            pump.cancel()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers = [writer]
        with contextlib.suppress(OSError):
            there, back = await self._proxy.connect()
            self._writers.append(back)
            self._pumps = [
                asyncio.create_task(self._pump(reader, back)),
                asyncio.create_task(self._pump(there, writer)),
            ]
            await asyncio.wait(self._pumps)
        for each in self._writers:
            each.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(pieces, sink))
        try:
            piece = b"-"
            while piece:
                try:
                    piece = await source.read(65536)
                except OSError:  # the other side is told of a reset, too
                    piece = b""
                pieces.put_nowait((asyncio.get_running_loop().time() + self._proxy.delay_s, piece))
            await sending
        finally:
            sending.cancel()

    async def _send(self, pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                await self._forwards.wait()
                if not piece:
                    if sink.can_write_eof():
                        sink.write_eof()
                    return
                sink.write(piece)
                await sink.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and end.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def proxy_of(url: str | URL) -> Iterator[tuple[Proxy, URL]]:
    """A proxy to the server of a URL, and the URL by way of it."""
    direct = make_url(url)
    folder = direct.query.get("host")
    target = folder if isinstance(folder, str) else (direct.host or "127.0.0.1", direct.port or 5432)
    with Proxy(target) as proxy:
        yield proxy, proxy.url_of(direct)
