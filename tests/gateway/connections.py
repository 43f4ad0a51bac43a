"""Clients that the test controls step by step: an ASGI connection, and a real port with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import uvicorn

from tests.gateway.world import World

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "messages": MESSAGES, "max_tokens": 100, **fields}


class Call:
    """One POST, with `sends` as headers; `hang_up` disconnects the client as the server sees it.

    `path` is a door's, and `body` its whole body instead of a chat request with `fields`.
    """

    def __init__(
        self,
        world: World,
        key: str | None = None,
        *,
        sends: dict[str, str] | None = None,
        path: str = "/chat/completions",
        body: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.frames = asyncio.Event()  # set with each message of the server
        self.stalled: asyncio.Event | None = None  # if there is one, the client reads nothing until it is set
        self.send_error: BaseException | None = None
        self._gone = asyncio.Event()
        self._sent = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"authorization", f"Bearer {key or world.key}".encode()),
                *((name.encode(), value.encode()) for name, value in (sends or {}).items()),
            ],
            "client": ("192.0.2.1", 50000),
        }
        self._request = json.dumps(chat_body(**fields) if body is None else body).encode()
        self.task = asyncio.create_task(world.app()(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.stalled is not None:
            await self.stalled.wait()
        if self.send_error is not None:
            raise self.send_error
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)
        self.frames.set()

    def hang_up(self) -> None:
        self._gone.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.body.decode():
                self.frames.clear()
                await self.frames.wait()

    async def done(self) -> Call:
        async with asyncio.timeout(60):
            await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of the stream's events, without DONE."""
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def data(self) -> list[str]:
        frames = self.body.decode().split("\n\n")
        return [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["delta"].get("content", "") for event in self.events if event.get("choices"))


@contextlib.asynccontextmanager
async def served(world: World) -> AsyncIterator[int]:
    """The app on a real port, in this loop. Idle connections stay as long as Serve lets them."""
    # asyncio turns Nagle's algorithm off only if it knows the protocol: otherwise half of the responses wait for 40 ms.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(world.app(), log_level="critical", lifespan="off", timeout_keep_alive=90))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def post(world: World, **fields: Any) -> bytes:
    """The body of one response over a real port: the bytes as they arrived, without chunk framing."""
    body = json.dumps(chat_body(**fields)).encode()
    async with served(world) as port, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        headers = {"authorization": f"Bearer {world.key}"}
        answer = await client.post(f"http://127.0.0.1:{port}/chat/completions", content=body, headers=headers)
    return answer.content


class DeafBalancer:
    """A load balancer that reads nothing from its clients after their request, and notices when a write fails.

    That is how HAProxy meets a client that hangs up on a request that is not streamed: the end of its side of the
    connection lies unread in the kernel until something is written to it. Carries one request a connection.
    """

    def __init__(self) -> None:
        self.port = 0
        self.replies = bytearray()  # what came from the server
        self._changed = asyncio.Event()
        self._connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    @contextlib.asynccontextmanager
    async def between(self, server_port: int) -> AsyncIterator[DeafBalancer]:
        """Forwards connections to the server while the context is open."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", server_port)
            self._connections[asyncio.current_task()] = upstream
            try:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    upstream.write(await _one_request(reader))
                    client: asyncio.ReadTransport = writer.transport  # type: ignore[assignment]
                    client.pause_reading()
                    while data := await upstream_reader.read(2**16):
                        self.replies += data
                        self._changed.set()
                        writer.write(data)
                        await writer.drain()
            finally:
                upstream.close()
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for upstream in self._connections.values():
                upstream.transport.abort()
            await asyncio.gather(*filter(None, self._connections), return_exceptions=True)

    async def until(self, look: Callable[[], bool]) -> None:
        """Waits until what has been forwarded satisfies `look`."""
        async with asyncio.timeout(60):
            while not look():
                self._changed.clear()
                await self._changed.wait()

    @property
    def lines(self) -> int:
        """Line feeds that came as chunks of their own."""
        return self.replies.count(b"\r\n1\r\n\n")


async def _one_request(reader: asyncio.StreamReader) -> bytes:
    """A request with a content-length, changed to be the last one of its connection."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
    [length] = [line.partition(b":")[2] for line in lines if line.lower().startswith(b"content-length:")]
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    head = b"\r\n".join([first, *kept, b"connection: close"])
    return head + b"\r\n\r\n" + await reader.readexactly(int(length))


def http_request(world: World, body: bytes, *headers: str, key: str | None = None, version: str = "1.1") -> bytes:
    lines = [
        f"POST /chat/completions HTTP/{version}",
        "host: gateway",
        f"authorization: Bearer {key or world.key}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
