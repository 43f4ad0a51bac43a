"""Clients whose every move the test decides: an ASGI connection by hand, and a real port with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from tests.gateway.world import World

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "messages": MESSAGES, "max_tokens": 100, **fields}


class Call:
    """One POST /chat/completions; `hang_up` is what the server sees of a client that goes away."""

    def __init__(self, world: World, key: str | None = None, **fields: Any) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.frames = asyncio.Event()  # set with each message of the server
        self.stalled: asyncio.Event | None = None  # where set, the client takes nothing until it is
        self.send_error: BaseException | None = None
        self._gone = asyncio.Event()
        self._sent = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/chat/completions",
            "raw_path": b"/chat/completions",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key or world.key}".encode())],
        }
        self._request = json.dumps(chat_body(**fields)).encode()
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
        async with asyncio.timeout(30):
            while text not in self.body.decode():
                self.frames.clear()
                await self.frames.wait()

    async def done(self) -> Call:
        async with asyncio.timeout(30):
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
    """The app on a real port, in this loop."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(world.app(), log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


def http_request(world: World, body: bytes, *headers: str, key: str | None = None) -> bytes:
    lines = [
        "POST /chat/completions HTTP/1.1", "host: gateway", f"authorization: Bearer {key or world.key}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
