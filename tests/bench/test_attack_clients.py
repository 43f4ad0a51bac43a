"""Hostile clients send what they say, count what they get, and stay within their bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import repeat

import pytest

from bench.attack import connections, customer, hostile
from bench.attack.connections import Hammer, Holder, Tally, status_of, whole
from bench.attack.hostile import ATTACKS, Target
from bench.attack.processes import burner
from bench.harness.servers import ServerError
from serve_app.contracts.key_format import well_formed

OK = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}"
WITHIN_S = 60

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@contextlib.asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[int]:
    """The port of a server for the time of the context."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)  # type: ignore[misc]
        writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not look():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(strategy: connections.Strategy) -> AsyncIterator[None]:
    task = asyncio.create_task(strategy.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        strategy.close()


@pytest.mark.parametrize(
    ("reply", "is_whole"),
    [
        (OK, True),
        (OK[:-1], False),
        (OK[:30], False),
        (b"HTTP/1.1 204 No Content\r\nCONTENT-LENGTH:0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", True),
    ],
)
def test_the_end_of_a_response_is_found(reply: bytes, is_whole: bool) -> None:
    assert whole(reply) is is_whole


def test_a_status_is_read_or_called_other() -> None:
    assert status_of(OK) == "401"
    assert status_of(b"nonsense") == "other"


async def test_a_connection_sends_its_next_request_when_it_has_the_response() -> None:
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            got.append(await reader.readexactly(4))
            for piece in (OK[:20], OK[20:]):
                writer.write(piece)
                await writer.drain()

    async with served(serve) as port:
        tally = Tally()
        strategy = Hammer(port, tally, 2, lambda number: iter([(b"%02d" % number, b"%02d" % n) for n in range(5)]))
        await asyncio.wait_for(strategy.run(), WITHIN_S)
        strategy.close()
    assert sorted(got) == sorted(b"%02d%02d" % (number, n) for number in range(2) for n in range(5))
    assert (tally.requests, tally.statuses, tally.cut) == (10, Counter({"401": 10}), 0)
    assert (tally.opened, tally.most_open, tally.bytes_written) == (2, 2, 40)


async def test_it_hangs_up_when_no_response_comes_in_time() -> None:
    ends = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal ends
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        ends += 1

    async with served(serve) as port:
        tally = Tally()
        strategy = Hammer(port, tally, 1, lambda _: iter([(b"long",)] * 3), hang_up_s=0.01)
        await asyncio.wait_for(strategy.run(), WITHIN_S)
        strategy.close()
        await until(lambda: ends == 3)
    assert (tally.hung_up, tally.cut, tally.opened) == (3, 0, 3)


async def test_what_the_service_cuts_is_counted_and_tried_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)

    async with served(serve) as port:
        tally = Tally()
        await asyncio.wait_for(Hammer(port, tally, 1, lambda _: iter([(b"x",)] * 3)).run(), WITHIN_S)
    assert (tally.requests, tally.cut, tally.opened, tally.open_now) == (3, 3, 3, 0)


async def test_it_stops_at_its_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BYTES", 100)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readexactly(10):
            writer.write(OK)

    async with served(serve) as port:
        tally = Tally()
        strategy = Hammer(port, tally, 1, lambda _: repeat((b"0123456789",)))
        await asyncio.wait_for(strategy.run(), WITHIN_S)
        strategy.close()
    assert tally.bytes_written == 110


async def test_connections_are_held_fed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OPENED_PER_S", 20)
    got: list[bytearray] = []
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(mine := bytearray())
        is_first = len(got) == 1
        while data := await reader.read(100):
            mine += data
            if is_first and closing.is_set():
                return

    async with served(serve) as port:
        tally = Tally()
        async with running(Holder(port, tally, 12, lambda number: b"begin", drip=b".")):
            await until(lambda: tally.open_now == 12 and all(b"begin." in one for one in got))
            closing.set()
            await until(lambda: tally.opened == 13 and tally.open_now == 12)
        await until(lambda: tally.open_now == 0)
    assert tally.most_open == 12
    assert tally.cut == 1


async def test_false_keys_are_well_formed_and_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "FALSE_KEYS", 40)
    keys: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines[1:] if line)
            json.loads(await reader.readexactly(int(fields["content-length"])))
            keys.append(fields["authorization"].removeprefix("Bearer "))
            writer.write(OK)

    async with served(serve) as port:
        tally = Tally()
        strategy = ATTACKS["wrong-keys"].prepare(Target(port, "", ""), tally)
        await asyncio.wait_for(strategy.run(), WITHIN_S)
        strategy.close()
    assert all(map(well_formed, keys))
    assert sorted(Counter(keys).values()) == [2] * 40


def test_large_bodies_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "LARGE", 20_000)
    for body in hostile.large_bodies():
        assert json.loads(body)["model"] == "svc-chat"


async def test_a_process_that_dies_is_an_error_and_no_endless_wait() -> None:
    process = burner(0.1)
    try:
        await process.ready()
        process.begin(60.0)
        process.stop()
        with pytest.raises((ServerError, OSError)):
            await process.ran(WITHIN_S)
    finally:
        process.stop()


async def test_the_customer_hangs_up_counts_its_next_requests_and_leaves_out_those_that_are_to_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("HANG_UPS", (3,)), ("HANG_UPS_S", 0.01), ("HANG_UP_S", 0.05), ("NEXT", 4), ("MANY", 34)):
        monkeypatch.setattr(customer, name, value)
    monkeypatch.setattr(customer, "NEXT_PER_S", 1000.0)
    monkeypatch.setattr(customer, "MANY_PER_S", 1000.0)
    seen: Counter[str] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if body["stream"]:
                await reader.readexactly(1)
        except (ConnectionError, asyncio.IncompleteReadError):
            seen["cut"] += 1
            return
        if body["model"] != customer.MEASURED:
            seen["refused"] += 1
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            seen["served"] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    async with served(serve) as port:
        rows = await customer.Customer(port, "key").run()
        await until(lambda: seen["cut"] == 3)
    assert seen == {"cut": 3, "served": 4 + 4 + 34 + 32, "refused": 2}
    assert [(row["calm"]["samples"], row["after"]["samples"], row["after"]["failed"]) for row in rows] == [
        (4, 4, 0),
        (34, 32, 0),
    ]
