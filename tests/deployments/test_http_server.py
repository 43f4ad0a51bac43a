"""Serve's HTTP server as the service amends it: request ids as in the log, no chunks over HTTP/1.0, quick accepts."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop
from ray.serve._private import http_util
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl

from deployments.http_server import KeptRequestIds, amend_http_server
from serve_app.contracts.generation import Delta, Started
from serve_app.gateway.web import RequestContext
from tests.gateway.connections import chat_body, http_request, served
from tests.gateway.haproxy import balanced
from tests.gateway.world import World, price, says, settled

KEPT = [b"mine", b"!", b"two words", b"x" * 128]
REPLACED = [b"", b" ", b"x" * 129, b"x" * 100_000, "\u00e9".encode(), b"\xff", b"a\tb", b"\x7f"]


@pytest.fixture(autouse=True)
def amended(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = (http_util, "RequestIdMiddleware"), (httptools_impl, "RequestResponseCycle"), (uvicorn, "Server")
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    amend_http_server()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(Request(scope).state.request_id)(scope, receive, send)


@pytest.fixture
def client() -> httpx.AsyncClient:
    whole = http_util._apply_middlewares(RequestContext(app, tag_responses=False), [])
    assert isinstance(whole, KeptRequestIds)
    return httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://test")


@pytest.mark.parametrize("sent", [*KEPT, *REPLACED], ids=lambda sent: repr(sent[:10]))
async def test_the_id_in_the_response_is_the_id_in_the_log(client: httpx.AsyncClient, sent: bytes) -> None:
    answer = await client.get("/", headers=[(b"x-request-id", sent), (b"x-request-id", b"second")])
    [echoed] = answer.headers.get_list("x-request-id")
    assert echoed == answer.text
    assert (echoed == sent.decode("latin-1")) == (sent in KEPT)


async def test_a_request_without_an_id_gets_one(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers.get_list("x-request-id") == [answer.text]
    assert answer.text.startswith("req_")


def streamed(world: World, version: str) -> bytes:
    body = json.dumps(chat_body(stream=True)).encode()
    return http_request(world, body, f"content-length: {len(body)}", "connection: close", version=version)


async def ask(port: int, request: bytes) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(60):
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), body


@pytest.mark.parametrize("behind_haproxy", [False, True])
async def test_a_stream_over_http_1_0_is_not_chunked_and_ends_with_the_connection(
    world: World, tmp_path: Path, behind_haproxy: bool
) -> None:
    world.backends.play(says("Hello", " world"))
    async with served(world) as gateway, balanced(gateway, tmp_path) as balancer:
        head, body = await ask(balancer if behind_haproxy else gateway, streamed(world, "1.0"))
        newer_head, newer_body = await ask(balancer if behind_haproxy else gateway, streamed(world, "1.1"))
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"data: ") == 5
    assert b"transfer-encoding: chunked" in newer_head
    assert newer_body.endswith(b"0\r\n\r\n")


async def test_a_stream_over_http_1_0_arrives_piece_by_piece_and_its_failure_as_an_event(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("Hel", 1), gate, RuntimeError("fault")])
    async with served(world) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(streamed(world, "1.0"))
        async with asyncio.timeout(60):
            await reader.readuntil(b'"Hel"')
            gate.set()
            rest = await reader.read(-1)
        writer.close()
    assert json.loads(rest.rpartition(b"data: ")[2])["error"]["code"] == "server_error"
    await settled(world, requests=1, spent=price(10, 1))


async def test_over_http_1_0_a_response_with_a_length_is_as_ever(world: World) -> None:
    async with served(world) as port:
        for method in ("HEAD", "GET"):
            head, body = await ask(port, f"{method} /health HTTP/1.0\r\nhost: a\r\n\r\n".encode())
            assert head.startswith(b"http/1.1 405" if method == "HEAD" else b"http/1.1 200")
            assert (body == b"") == (method == "HEAD")


def test_waiting_connections_are_accepted_in_few_iterations_of_the_event_loop() -> None:
    async def count() -> int:
        iterations = 0
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started:
                await asyncio.sleep(0)
            clients = [socket.create_connection(listening.getsockname()) for _ in range(64)]  # the loop waits meanwhile
            while len(server.server_state.connections) < len(clients):
                iterations += 1
                await asyncio.sleep(0)
            for client in clients:
                client.close()
            server.should_exit = True
            await serving
        return iterations

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(count()) < 32
