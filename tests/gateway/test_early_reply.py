"""A long reply that is not streamed begins early, so that the server notices when the client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from serve_app.api.chat_reply import Choice, Usage, complete_reply
from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started
from serve_app.contracts.ports import BackendUnavailable
from tests.gateway.connections import MESSAGES, Call, DeafBalancer, chat_body, http_request, served
from tests.gateway.world import World, price, says, settled, until

LONG: dict[str, float] = {"early_reply_s": 0.02, "line_feed_s": 0.01}  # every reply that waits for a gate takes long
SETTING = 60.0  # of both where the test moves the clock: longer than any test waits


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def slow(make_world: Callable[..., Any]) -> World:
    """A gateway for which each reply that waits takes long."""
    made: World = await make_world(**LONG)
    return made


@contextlib.asynccontextmanager
async def balanced(world: World) -> AsyncIterator[DeafBalancer]:
    """The gateway on a real port behind a load balancer."""
    async with served(world) as port, DeafBalancer().between(port) as balancer:
        yield balancer


def whole_request(world: World, version: str = "1.1") -> bytes:
    body = json.dumps(chat_body()).encode()
    return http_request(world, body, f"content-length: {len(body)}", "connection: close", version=version)


async def ask(port: int, request: bytes) -> tuple[list[bytes], bytes]:
    """Lines of the head, and all bytes after it until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(60):
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    return head.split(b"\r\n"), rest


def names(head: list[bytes]) -> list[bytes]:
    return [line.partition(b":")[0].lower() for line in head[1:]]


def expected(world: World, reply: Any, *, prompt: int, completion: int, text: str) -> bytes:
    [call] = world.backends.calls
    return complete_reply(
        id=call.request_id,
        created=reply["created"],
        model="svc-chat",
        fingerprint="fp_fake",
        choices=[Choice(text, "stop")],
        usage=Usage(prompt_tokens=prompt, completion_tokens=completion),
    )


async def by_sdk(world: World, port: int, **options: Any) -> Any:
    given: Any = {"api_key": world.key, "base_url": f"http://127.0.0.1:{port}/v1", "max_retries": 0, **options}
    request: Any = {"model": "svc-chat", "messages": MESSAGES, "max_tokens": 100}
    async with openai.AsyncOpenAI(**given) as client:
        return await client.chat.completions.create(**request)


# Short replies


async def test_a_short_reply_is_one_piece_with_its_length(world: World) -> None:
    world.backends.play(says("Hel", "lo"))
    async with served(world) as port:
        head, body = await ask(port, whole_request(world))
    assert head[0] == b"HTTP/1.1 200 OK"
    assert names(head) == [
        b"date", b"server", b"content-type",
        b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests",
        b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens",
        b"server-timing", b"x-trace-id", b"content-length", b"x-request-id", b"connection",
    ]  # fmt: skip
    assert f"content-length: {len(body)}".encode() in head
    assert body == expected(world, json.loads(body), prompt=10, completion=2, text="Hello")


async def test_before_the_time_limit_a_reply_is_short_in_any_number_of_pieces(slow: World) -> None:
    slow.services.clock = Clock()
    gates = [asyncio.Event(), asyncio.Event()]
    slow.backends.play(
        [Started(10, 0), Delta("a", 1), gates[0], Delta("b", 2), gates[1], Finished(FinishReason.STOP, 10, 0, 2)]
    )
    waited = asyncio.Event()
    asyncio.get_running_loop().call_later(3 * LONG["early_reply_s"], waited.set)
    call = Call(slow)
    await waited.wait()  # by the loop's own time the reply is late
    for gate in gates:
        gate.set()
    await call.done()
    assert call.headers["content-length"] == str(len(call.body))
    assert call.body.startswith(b"{")


async def test_http_1_0_has_no_chunks_and_waits_for_the_whole_reply(slow: World) -> None:
    slow.services.clock = clock = Clock()
    gate = asyncio.Event()
    slow.backends.play([Started(10, 0), gate, Delta("a", 1), Finished(FinishReason.STOP, 10, 0, 1)])
    async with served(slow) as port:
        asking = asyncio.create_task(ask(port, whole_request(slow, version="1.0")))
        await until(lambda: slow.backends.running)
        clock.now = 100.0
        gate.set()
        head, body = await asking
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["choices"][0]["message"]["content"] == "a"


# Long replies


async def test_a_long_reply_is_line_feeds_and_then_the_same_json(slow: World) -> None:
    gate = asyncio.Event()
    slow.backends.play([Started(10, 0), Delta("Hel", 1), gate, Delta("lo", 2), Finished(FinishReason.STOP, 10, 0, 2)])
    async with balanced(slow) as balancer:
        url = f"http://127.0.0.1:{balancer.port}/chat/completions"
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            headers = {"authorization": f"Bearer {slow.key}", "x-request-id": "mine-1"}
            asking = asyncio.create_task(client.post(url, json=chat_body(), headers=headers))
            await balancer.until(lambda: balancer.lines >= 3)
            gate.set()
            answer = await asking
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "999"
    assert "content-length" not in answer.headers
    body = answer.content.lstrip(b"\n")
    assert len(answer.content) - len(body) == balancer.lines
    assert body == expected(slow, answer.json(), prompt=10, completion=2, text="Hello")
    await settled(slow, requests=1, spent=price(10, 2))


async def test_a_long_reply_has_the_headers_of_a_short_one_but_for_the_length(slow: World) -> None:
    slow.services.clock = clock = Clock()
    gate = asyncio.Event()
    slow.backends.play(says("a"), [Started(10, 0), gate, *says("a")[1:]])
    async with balanced(slow) as balancer:
        short, _ = await ask(balancer.port, whole_request(slow))
        asking = asyncio.create_task(ask(balancer.port, whole_request(slow)))
        await until(lambda: slow.backends.running)
        clock.now = 100.0
        await balancer.until(lambda: balancer.lines >= 1)
        gate.set()
        long, _ = await asking
    assert set(names(short)) - set(names(long)) == {b"content-length"}
    assert set(names(long)) - set(names(short)) == {b"transfer-encoding"}


async def test_the_sdk_reads_a_long_reply(slow: World) -> None:
    gate = asyncio.Event()
    slow.backends.play([Started(10, 0), Delta("Hel", 1), gate, Delta("lo", 2), Finished(FinishReason.STOP, 10, 0, 2)])
    async with balanced(slow) as balancer:
        asking = asyncio.create_task(by_sdk(slow, balancer.port))
        await balancer.until(lambda: balancer.lines >= 2)
        gate.set()
        reply = await asking
    assert reply.choices[0].message.content == "Hello"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 2)
    await settled(slow, requests=1, spent=price(10, 2))


async def test_a_connection_outlives_a_long_reply(slow: World) -> None:
    gate = asyncio.Event()
    slow.backends.play([Started(10, 0), gate, *says("one")[1:]], says("two"))
    opened: list[str] = []

    async def trace(event: str, _: Any) -> None:
        opened.extend([event] if event == "connection.connect_tcp.complete" else [])

    options: Any = {"headers": {"authorization": f"Bearer {slow.key}"}, "extensions": {"trace": trace}}
    async with served(slow) as port, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        url = f"http://127.0.0.1:{port}/chat/completions"
        async with client.stream("POST", url, json=chat_body(), **options) as long:
            pieces = long.aiter_bytes()
            assert await anext(pieces) == b"\n"
            gate.set()
            first = b"".join([piece async for piece in pieces])
        second = await client.post(url, json=chat_body(), **options)
    assert [json.loads(body)["choices"][0]["message"]["content"] for body in (first, second.content)] == ["one", "two"]
    assert len(opened) == 1
    await settled(slow, requests=2, spent=2 * price(10, 1))


async def test_the_time_counts_from_when_the_request_came(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(early_reply_s=SETTING, line_feed_s=SETTING)
    world.services.clock = clock = Clock()
    queued, model = asyncio.Event(), asyncio.Event()
    world.backends.play([queued, Started(10, 0), model, *says("a")[1:]])
    call = Call(world)
    await until(lambda: world.backends.running)
    clock.now = SETTING
    queued.set()
    await call.until("\n")
    model.set()
    await call.done()
    assert call.body.startswith(b"\n{")
    assert call.json["choices"][0]["message"]["content"] == "a"


async def test_deltas_do_not_put_the_line_feeds_off(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(early_reply_s=SETTING, line_feed_s=SETTING)
    world.services.clock = clock = Clock()
    gates = [asyncio.Event() for _ in range(3)]
    steps = [step for number, gate in enumerate(gates, 1) for step in (gate, Delta("a", number))]
    world.backends.play([Started(10, 0), *steps, end := asyncio.Event(), Finished(FinishReason.STOP, 10, 0, 3)])
    call = Call(world)
    await until(lambda: world.backends.running)
    for number, gate in enumerate(gates):
        clock.now = SETTING * (number + 1)
        gate.set()
        await call.until("\n" * (number + 1))
    end.set()
    await call.done()
    assert call.body.startswith(b"\n\n\n{")


@pytest.mark.parametrize(
    ("rejected", "status"),
    [(Rejected(Rejection.CONTEXT, prompt_tokens=40000, limit=32768), 422), (Rejected(Rejection.QUEUE_FULL), 503)],
    ids=["context", "queue"],
)
async def test_before_the_engine_has_started_a_late_failure_keeps_its_status(
    slow: World, rejected: Rejected, status: int
) -> None:
    slow.services.clock = clock = Clock()
    queued = asyncio.Event()
    slow.backends.play([queued, rejected])
    call = Call(slow)
    await until(lambda: slow.backends.running)
    clock.now = 100.0
    queued.set()
    await call.done()
    assert call.status == status
    assert call.body.startswith(b'{"error"')
    await settled(slow, requests=0, spent=0)


async def test_a_long_reply_is_in_the_ledger_before_it_leaves(slow: World) -> None:
    settle = slow.accounting.wire_settle.hold["*"] = asyncio.Event()
    model = asyncio.Event()
    slow.backends.play([Started(10, 0), model, *says("a")[1:]])
    call = Call(slow)
    await call.until("\n")
    model.set()
    await slow.accounting.wire_settle.seen("*").wait()
    assert not call.body.strip()
    assert not call.ended
    settle.set()
    assert (await call.done()).ended
    await settled(slow, requests=1, spent=price(10, 1))


# Clients that disconnect


@pytest.mark.parametrize("begun", [False, True], ids=["before the reply has begun", "after"])
async def test_a_client_that_is_gone_behind_a_deaf_load_balancer_is_noticed_within_two_lines(
    slow: World, begun: bool
) -> None:
    slow.services.clock = clock = Clock()
    [script] = slow.backends.play([Started(10, 0), Delta("a", 1), Delta("b", 4), asyncio.Event()])
    async with balanced(slow) as balancer:
        loop = asyncio.get_running_loop()
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", balancer.port))
        await loop.sock_sendall(client, whole_request(slow))
        await until(lambda: slow.backends.running)
        if begun:
            clock.now += 1
            received = b""
            while not received.endswith(b"1\r\n\n\r\n"):
                received += await loop.sock_recv(client, 4096)
        client.close()
        assert not script.closed.is_set()
        before = balancer.lines
        for line in (1, 2):  # each step of the clock is one line feed, and none comes of itself
            clock.now += 1
            await until(lambda: script.closed.is_set() or balancer.lines == before + line)  # noqa: B023
        await asyncio.wait_for(script.closed.wait(), 60)
        await settled(slow, requests=1, spent=price(10, 4))
        await until(lambda: slow.metrics.requests)
    assert slow.metrics.requests == [("svc-chat", 499)]
    assert slow.metrics.settlements == ["cancelled"]


async def test_a_line_feed_that_can_not_be_sent_is_a_client_that_is_gone(slow: World) -> None:
    # From a server that reports a broken connection only when it writes.
    [script] = slow.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(slow)
    await call.until("\n")
    call.send_error = ConnectionResetError("gone")
    await call.done()
    assert script.closed.is_set()
    await settled(slow, requests=1, spent=price(10, 1))
    assert slow.metrics.requests == [("svc-chat", 499)]


async def test_a_client_that_is_gone_once_the_reply_has_begun_pays_for_what_was_produced(slow: World) -> None:
    [script] = slow.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(slow)
    await call.until("\n")
    call.hang_up()
    await call.done()
    await asyncio.wait_for(script.closed.wait(), 60)
    await settled(slow, requests=1, spent=price(10, 1))


# Failures


ENDS: Any = pytest.mark.parametrize(
    "end",
    [[BackendUnavailable("died")], [RuntimeError("a secret path")], [Finished(FinishReason.STOP, 10, 11, 1)]],
    ids=["replica dies", "replica fails", "ledger refuses"],
)


async def begun_and_failed(
    world: World, end: list[Any], client: Callable[[DeafBalancer], Awaitable[Any]]
) -> tuple[DeafBalancer, Any]:
    """Fails a reply after it has begun. Returns the balancer and the client's response or exception."""
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("half", 1), gate, *end])
    async with balanced(world) as balancer:
        asking = asyncio.ensure_future(client(balancer))
        await balancer.until(lambda: balancer.lines >= 1)
        gate.set()
        await asyncio.wait([asking])
        await until(lambda: world.is_idle and world.metrics.requests)
    return balancer, asking.exception() or asking.result()


@ENDS
async def test_a_failure_after_the_reply_has_begun_cuts_it_and_the_sdk_raises(
    slow: World, end: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "ray.serve"):
        balancer, got = await begun_and_failed(slow, end, lambda one: by_sdk(slow, one.port))
    assert isinstance(got, openai.APIConnectionError)
    _, _, sent = bytes(balancer.replies).partition(b"\r\n\r\n")
    assert sent == b"1\r\n\n\r\n" * balancer.lines  # no error, no text, and not the last chunk
    *_, generated = slow.backends.calls
    assert any(generated.request_id in record.getMessage() for record in caplog.records)
    assert slow.spent == 0
    assert slow.metrics.requests[0][1] in (500, 503)


async def test_the_sdk_tries_a_reply_that_was_cut_again_and_pays_once(slow: World) -> None:
    gate = asyncio.Event()
    slow.backends.play([Started(10, 0), Delta("half", 1), gate, RuntimeError("fault")], says("Hello", " again"))
    async with balanced(slow) as balancer:
        asking = asyncio.create_task(by_sdk(slow, balancer.port, max_retries=1))
        await balancer.until(lambda: balancer.lines >= 1)
        gate.set()
        reply = await asking
    assert reply.choices[0].message.content == "Hello again"
    await settled(slow, requests=2, spent=price(10, 2))


async def test_a_reply_whose_usage_can_not_be_kept_is_cut_and_not_billed(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(**LONG, settle_timeout_s=0.02, spool_max_bytes=4096)
    world.settlements.start()
    world.spool.max_bytes = 1
    world.accounting.wire_settle.down()
    model = asyncio.Event()
    world.backends.play([Started(10, 0), model, *says("a")[1:]])
    call = Call(world)
    await call.until("\n")
    model.set()
    await call.done()
    assert not call.ended
    assert not call.body.strip()
    world.accounting.wire_settle.up()
    await settled(world, requests=1, spent=0)
