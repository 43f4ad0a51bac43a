"""The gateway behind the HAProxy that Ray Serve brings: what it passes on of hang-ups, long replies and cut ones."""

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

from serve_app.engine.request import Delta, Finished, FinishReason, Started
from serve_app.gateway import replies
from tests.gateway.connections import MESSAGES, chat_body, http_request, served
from tests.gateway.haproxy import balanced
from tests.gateway.world import World, price, settled, until


@pytest.fixture
async def world(make_world: Callable[..., Any]) -> World:
    made: World = await make_world(early_reply_s=0.02, line_feed_s=0.01)
    return made


@pytest.fixture
async def port(world: World, tmp_path: Path) -> AsyncIterator[int]:
    """Of HAProxy, which has the gateway behind it."""
    async with served(world) as gateway_port, balanced(gateway_port, tmp_path) as number:
        yield number


@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "head and body apart"])
async def test_a_hang_up_on_a_reply_that_is_not_streamed_stops_the_model(
    world: World, port: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = asyncio.Event()
    read_body = replies.read_body

    async def seen(*arguments: Any) -> bytes:
        reading.set()
        return await read_body(*arguments)

    monkeypatch.setattr(replies, "read_body", seen)
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), Delta("b", 4), asyncio.Event()])
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    body = json.dumps(chat_body()).encode()
    head = http_request(world, b"", f"content-length: {len(body)}")
    if apart:
        # As HTTP clients send it. After such a request HAProxy 2.8 reads nothing more, not even the client's end.
        await loop.sock_sendall(client, head)
        await asyncio.wait_for(reading.wait(), 30)
        await loop.sock_sendall(client, body)
    else:
        await loop.sock_sendall(client, head + body)
    await until(lambda: world.backends.running)
    client.close()
    await asyncio.wait_for(script.closed.wait(), 30)
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


def test_serves_haproxy_writes_no_client_addresses() -> None:
    """So it is no hop of `trusted_proxies`. Should Ray begin to write them, that setting's documentation is wrong."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    template = (Path(ray.origin).parent / "serve" / "_private" / "haproxy_templates.py").read_text()
    assert "http_frontend" in template
    assert "forwardfor" not in template
    assert "x-forwarded" not in template.lower()
