"""A body costs nothing before its sender is known, and then no more than the sender's part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import pytest
from starlette.requests import Request

from serve_app.api import chat_door
from serve_app.api.errors import ApiError
from serve_app.contracts import key_format as keys
from serve_app.gateway import web
from serve_app.gateway.web import SMALL_BODY
from tests.gateway.connections import chat_body, served
from tests.gateway.world import OPERATOR, World, until

LARGE = 400_000


class Upload:
    """One POST whose body the test sends piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)

    async def is_closed(self) -> bool:
        async with asyncio.timeout(60):
            try:
                return await self.reader.read(1) == b""
            except OSError:
                return True


@pytest.fixture
async def port(world: World) -> AsyncIterator[int]:
    async with served(world) as number:
        yield number


@pytest.fixture
async def upload(port: int) -> AsyncIterator[Callable[..., Any]]:
    made: list[Upload] = []

    async def begin(key: str, *headers: str, path: str = "/chat/completions") -> Upload:
        one = Upload(*await asyncio.open_connection("127.0.0.1", port))
        made.append(one)
        lines = [f"POST {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {key}", *headers, "", ""]
        await one.send("\r\n".join(lines).encode())
        return one

    yield begin
    for one in made:
        one.writer.close()


async def serves(world: World, upload: Callable[..., Any], key: str | None = None) -> bool:
    body = json.dumps(chat_body()).encode()
    one = await upload(key or world.key, f"content-length: {len(body)}")
    await one.send(body)
    return bool((await one.answer())[0] == 200)


def bodies_of(world: World) -> web.Bodies:
    """The incomplete bodies of callers that are known."""
    endpoint = next(route.endpoint for route in world.app().routes if route.path == "/chat/completions")  # type: ignore[attr-defined]
    found: web.Bodies = endpoint.bodies.identified
    return found


# Before the sender is known


async def test_a_wrong_key_is_401_before_any_of_the_body_came_and_the_connection_is_closed(
    upload: Callable[..., Any],
) -> None:
    lengths = ("content-length: 4000000", "content-length: 100", "transfer-encoding: chunked")
    for length, key in product(lengths, (keys.new_key(), "sk-nonsense")):
        one = await upload(key, length)
        status, headers, _ = await one.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert await one.is_closed()


async def test_no_other_path_reads_a_body_without_a_key(upload: Callable[..., Any]) -> None:
    for path in ("/admin/accounts", "/nowhere", "/user/balance"):
        one = await upload("sk-nonsense", "content-length: 4000000", path=path)
        status, headers, _ = await one.answer()
        assert status in (401, 404, 405)
        assert headers["connection"] == "close"
        assert await one.is_closed()


async def test_a_body_without_a_valid_key_is_never_parsed(
    world: World, upload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_door, "parse_chat_request", pytest.fail)
    body = json.dumps(chat_body(user=[[]] * 1000)).encode()
    for _ in range(3):
        one = await upload(keys.new_key(), f"content-length: {len(body)}")
        await one.send(body)
        assert (await one.answer())[0] == 401


async def test_a_key_that_was_confirmed_a_moment_ago_costs_no_further_hop(
    world: World, upload: Callable[..., Any]
) -> None:
    for _ in range(3):
        assert await serves(world, upload)
    asked = [type(ask).__name__ for ask in world.limiter.asked]
    assert (asked.count("Identify"), asked.count("Admit")) == (2, 3)  # once without and once with a look-up


async def test_a_confirmed_key_that_is_revoked_is_401_at_once(world: World, upload: Callable[..., Any]) -> None:
    assert await serves(world, upload)
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.revoke_key(key.key_id)
    await world.limiter.service.follow()
    body = json.dumps(chat_body()).encode()
    one = await upload(world.key, f"content-length: {len(body)}")
    await one.send(body)
    assert (await one.answer())[0] == 401
    assert not world.authenticator.is_confirmed(keys.digest(world.key))


async def test_a_confirmation_ends(world: World, monkeypatch: pytest.MonkeyPatch, upload: Callable[..., Any]) -> None:
    monkeypatch.setattr("serve_app.gateway.authentication.CONFIRMED_S", 0.0)
    for _ in range(3):
        assert await serves(world, upload)
    assert [type(ask).__name__ for ask in world.limiter.asked].count("Identify") == 4


async def test_while_the_limiter_is_away_what_comes_is_bounded(
    world: World, upload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "LATE_S", 0.01)
    gate = world.limiter.wire.hold["Identify"] = asyncio.Event()
    one = await upload(world.key, "transfer-encoding: chunked")
    answer = asyncio.create_task(one.answer())
    for _ in range(100):
        await one.send(b"%x\r\n%s\r\n" % (65536, b"x" * 65536))
        if answer.done():
            break
    assert (await answer)[0] == 400  # as soon as it is too large, although nobody knows whose it is
    gate.set()


# Work beside the loop


async def test_large_bodies_are_parsed_beside_the_loop_and_small_ones_on_it(
    world: World, upload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    parse = chat_door.parse_chat_request

    def seen(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(chat_door, "parse_chat_request", seen)
    for content in ("Hi", "x" * LARGE):
        body = json.dumps(chat_body(messages=[{"role": "user", "content": content}])).encode()
        one = await upload(world.key, f"content-length: {len(body)}")
        await one.send(body)
        assert (await one.answer())[0] == 200
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("parse")


# Each sender's part


async def test_one_keys_large_bodies_are_429_and_others_are_served(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(bodies_max_bytes=1024 * 1024, max_body_bytes=LARGE)
    _, other = world.new_account()
    async with served(world) as port:
        made: list[Upload] = []

        async def upload(key: str, *headers: str) -> Upload:
            one = Upload(*await asyncio.open_connection("127.0.0.1", port))
            made.append(one)
            lines = ["POST /chat/completions HTTP/1.1", "host: a", f"authorization: Bearer {key}", *headers, "", ""]
            await one.send("\r\n".join(lines).encode())
            return one

        assert await serves(world, upload)
        held = await upload(world.key, f"content-length: {LARGE}")
        await held.send(b"x" * 300_000)
        await until(lambda: bodies_of(world).size == 300_000 - SMALL_BODY)
        second = await upload(world.key, f"content-length: {LARGE}")
        await second.send(b"x" * 300_000)
        status, headers, reply = await second.answer()
        assert (status, reply["error"]["code"]) == (429, "concurrency")
        assert headers["retry-after"] == "1"
        assert await serves(world, upload)  # a small one of the same key
        large = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 300_000}])).encode()
        one = await upload(other, f"content-length: {len(large)}")
        await one.send(large)
        assert (await one.answer())[0] == 200
        for one in made:
            one.writer.close()


def test_all_bodies_together_are_bounded_and_small_ones_are_always_served() -> None:
    bodies = web.Bodies()
    shares = [web.Share(bodies, f"key {n}", 1_000_000, 400_000) for n in range(4)]
    with contextlib.ExitStack() as open_now:
        for share in shares:
            open_now.enter_context(share)
        for share in shares[:3]:
            share.grow(300_000 + SMALL_BODY)
        shares[3].grow(SMALL_BODY)
        with pytest.raises(Exception, match="Try again") as refused:
            shares[3].grow(300_000)
        assert refused.value.status == 503  # type: ignore[attr-defined]
    assert (bodies.size, bodies.count) == (0, 0)


async def test_bodies_of_one_key_that_do_not_end_are_bounded_in_number(
    world: World, upload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_BODIES_PER_KEY", 3)
    monkeypatch.setattr(web, "MOMENT_S", 0.0)
    _, other = world.new_account()
    assert await serves(world, upload)
    bodies = bodies_of(world)
    for _ in range(3):
        await upload(world.key, "content-length: 100")
    await until(lambda: bodies.count == 3)
    one = await upload(world.key, "content-length: 100")
    assert (await one.answer())[0] == 429
    assert await serves(world, upload, other)


def test_requests_that_come_all_at_once_are_not_taken_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOMENT_S", 60.0)
    bodies = web.Bodies()
    with contextlib.ExitStack() as open_now:
        for _ in range(4 * web.MAX_BODIES_PER_KEY):
            open_now.enter_context(web.Share(bodies, "key", 10**6, 10**6))
        with pytest.raises(ApiError, match="incomplete"):
            open_now.enter_context(web.Share(bodies, "key", 10**6, 10**6))
    assert bodies.count == 0


def test_bodies_of_many_senders_that_do_not_end_leave_room_for_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_BODIES", 10)
    bodies = web.Bodies()
    with contextlib.ExitStack() as open_now:
        for number in range(10):
            open_now.enter_context(web.Share(bodies, f"key {number}", 10**6, 10**6))
        with pytest.raises(ApiError, match="incomplete") as refused:
            open_now.enter_context(web.Share(bodies, "another key", 10**6, 10**6))
        assert refused.value.status == 503
        assert not bodies.of_sender("another key")
    assert bodies.count == 0


# How long a body may take


class Coming:
    """A body of which the test sends pieces, and its reading by a gateway that allows 600 s and a second a byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(web, "GRACE_S", 600.0)
        monkeypatch.setattr(web, "MIN_RATE", 1)
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        request = Request({"type": "http", "headers": []}, self._pieces.get)
        self.reading = asyncio.create_task(web.BodyReader(request, 10**6, 10_000.0).read())

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        for _ in range(10):  # turns of the loop, in which it is read
            await asyncio.sleep(0)


async def test_a_body_that_comes_too_slowly_is_408_long_before_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[float], None]
) -> None:
    body = Coming(monkeypatch)
    for _ in range(3):
        let_pass(300.0)
        await body.send(b"x" * 100)
    assert not body.reading.done(), "900 s are allowed"
    let_pass(300.0)
    with pytest.raises(ApiError) as refused:
        await body.reading
    assert (refused.value.status, refused.value.code) == (408, "body_timeout")


async def test_a_body_that_comes_steadily_has_its_time(
    monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[float], None]
) -> None:
    body = Coming(monkeypatch)
    for _ in range(10):
        let_pass(400.0)
        await body.send(b"x" * 400)
    await body.send(b"", more=False)
    assert await body.reading == b"x" * 4000


async def test_what_came_while_the_gateway_was_busy_is_in_time(
    monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[float], None]
) -> None:
    monkeypatch.setattr(web, "LISTEN_S", 60.0)
    body = Coming(monkeypatch)
    await body.send(b"x")
    let_pass(2000.0)
    for _ in range(10):  # the time is over, and what the system has of the body is not read yet
        await asyncio.sleep(0)
    await body.send(b"y", more=False)
    assert await body.reading == b"xy"


async def test_operators_bodies_are_read_by_the_same_rules(world: World, upload: Callable[..., Any]) -> None:
    one = await upload(OPERATOR, "content-length: 100000", path="/admin/accounts")
    assert (await one.answer())[0] == 400
    items = b'{"name": [' + b"[]," * 20_000 + b"0]}"
    one = await upload(OPERATOR, f"content-length: {len(items)}", path="/admin/accounts")
    await one.send(items)
    assert (await one.answer())[0] == 400
