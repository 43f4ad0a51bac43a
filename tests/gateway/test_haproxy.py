"""The gateway behind the HAProxy of Ray Serve: how it passes on hang-ups, long replies and cut replies."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.gateway import web
from serve_app.launch.driver import HAPROXY_RETRY_ON
from tests.gateway.connections import MESSAGES, chat_body, http_request, served
from tests.gateway.haproxy import balanced
from tests.gateway.world import World, price, settled, until


def serves_template() -> str:
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return (Path(ray.origin).parent / "serve" / "_private" / "haproxy_templates.py").read_text()


@pytest.fixture
async def world(make_world: Callable[..., Any]) -> World:
    made: World = await make_world(early_reply_s=0.02, line_feed_s=0.01)
    return made


@pytest.fixture
async def port(world: World, tmp_path: Path) -> AsyncIterator[int]:
    """Yields the port of an HAProxy with the gateway behind it."""
    async with served(world) as gateway_port, balanced(gateway_port, tmp_path) as number:
        yield number


@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "head and body apart"])
async def test_a_hang_up_on_a_reply_that_is_not_streamed_stops_the_model(
    world: World, port: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = asyncio.Event()
    read = web.BodyReader.read

    async def seen(*arguments: Any) -> bytes:
        reading.set()
        return await read(*arguments)

    monkeypatch.setattr(web.BodyReader, "read", seen)
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), Delta("b", 4), asyncio.Event()])
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    body = json.dumps(chat_body()).encode()
    head = http_request(world, b"", f"content-length: {len(body)}")
    if apart:
        # As HTTP clients send it. After such a request HAProxy 2.8 reads nothing more and misses a disconnect.
        await loop.sock_sendall(client, head)
        await asyncio.wait_for(reading.wait(), 60)
        await loop.sock_sendall(client, body)
    else:
        await loop.sock_sendall(client, head + body)
    await until(lambda: world.backends.running)
    client.close()
    await asyncio.wait_for(script.closed.wait(), 60)
    await settled(world, requests=1, spent=price(10, 4))


@pytest.mark.parametrize("fails", [False, True])
async def test_long_replies_and_cut_ones_reach_the_sdk_as_what_they_are(world: World, port: int, fails: bool) -> None:
    gate = asyncio.Event()
    end = RuntimeError("fault") if fails else Finished(FinishReason.STOP, 10, 0, 1)
    world.backends.play([Started(10, 0), Delta("half", 1), gate, end])
    async with openai.AsyncOpenAI(api_key=world.key, base_url=f"http://127.0.0.1:{port}", max_retries=0) as client:
        request: Any = {"model": "svc-chat", "messages": MESSAGES, "max_tokens": 100}
        begun = client.chat.completions.with_streaming_response.create(**request)
        async with begun as response:  # entered with the headers: the reply has begun
            assert response.status_code == 200
            gate.set()
            if fails:
                with pytest.raises(Exception, match="incomplete chunked read"):
                    await response.parse()
            else:
                reply = await response.parse()
                assert reply.choices[0].message.content == "half"
    await settled(world, requests=1, spent=0 if fails else price(10, 1))


async def test_a_head_that_does_not_end_is_408_and_the_connection_ends(world: World, tmp_path: Path) -> None:
    setting = HAPROXY_RETRY_ON.replace("10s", "1s")
    assert setting != HAPROXY_RETRY_ON
    async with served(world) as gateway_port, balanced(gateway_port, tmp_path, retry_on=setting) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /chat/completions HTTP/1.1\r\nhost: a\r\nx-long: ")
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_serve_writes_the_setting_that_carries_the_timeout_into_haproxys_defaults() -> None:
    template = serves_template()
    defaults = template[template.index("\ndefaults") : template.index("\nfrontend prometheus")]
    assert "    retry-on {{ config.retry_on }}\n" in defaults
    assert "{% if config.timeout_http_request_s is not none %}" in defaults  # and nothing sets it


def test_serves_haproxy_writes_no_client_addresses() -> None:
    """So it does not count for `trusted_proxies`. If Ray begins to write them, the setting's documentation is wrong."""
    template = serves_template()
    assert "http_frontend" in template
    assert "forwardfor" not in template
    assert "x-forwarded" not in template.lower()
