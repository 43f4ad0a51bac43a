"""The load generator against a server of its own: keeps the number of requests in flight, cuts, and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from bench.engine import plan, workloads
from bench.harness.client import Call, closed_loop, disturbed, one
from bench.harness.replies import read

EVENT = b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass
class Fake:
    """Streams `events` events to each request; `endless` ones never stop, `broken` ones are refused."""

    port: int = 0
    events: int = 3
    open: int = 0
    most_open: int = 0
    asked: list[bytes] = field(default_factory=list)

    def call(self, name: str = "ok") -> Call:
        body = name.encode()
        head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        return Call(self.port, head + body, self.events)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        name = await reader.readexactly(length)
        self.asked.append(name)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if name == b"broken":
                writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy")
                return
            writer.write(HEAD)
            for number in range(10**9 if name == b"endless" else self.events):
                writer.write(EVENT)
                await writer.drain()
                await asyncio.sleep(0.001 if number else 0)
            writer.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    fake = Fake()
    server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    yield fake
    server.close()


async def test_as_many_requests_are_in_flight_as_there_are_clients(fake: Fake) -> None:
    window = await closed_loop(5, lambda client, number: fake.call(), 0.05, 60.0)
    assert fake.most_open == 5
    assert len(window.replies) >= 5
    assert all(read(reply).problem is None for reply in window.replies)
    assert window.ended_at - window.began_at >= 0.05


async def test_each_client_finishes_a_request_before_the_load_ends(fake: Fake) -> None:
    window = await closed_loop(4, lambda client, number: fake.call(), 0.0, 60.0)
    assert sum(reply.ended_at is not None for reply in window.replies) >= 4


async def test_a_load_ends_in_time_and_what_runs_is_cut(fake: Fake) -> None:
    window = await closed_loop(2, lambda client, number: fake.call("endless"), 0.0, 0.1)
    assert all(reply.ended_at is None for reply in window.replies)
    assert all(at <= window.ended_at for reply in window.replies for at, _ in reply.pieces)
    async with asyncio.timeout(60):
        while fake.open:
            await asyncio.sleep(0.01)


async def test_a_refused_client_does_not_retry_in_a_tight_loop(fake: Fake) -> None:
    window = await closed_loop(3, lambda client, number: fake.call("broken"), 0.05, 60.0)
    assert len(window.replies) == 3
    assert {read(reply).problem for reply in window.replies} == {"HTTP 503: busy"}


async def test_a_missing_server_is_a_problem_not_an_exception() -> None:
    reply = await one(Call(1, b"", 1), 1.0)
    assert read(reply).problem is not None


async def test_streams_run_before_and_while_another_is_prefilled(fake: Fake) -> None:
    result = await disturbed([fake.call("endless")] * 3, fake.call(), 0.05, 60.0)
    assert len(result.streams) == 3
    assert result.calm_until - result.calm_from >= 0.05
    assert read(result.intruder).texts
    assert all(stream.ended_at is None for stream in result.streams)


def test_no_prompt_is_asked_twice_and_the_same_seed_asks_the_same() -> None:
    for make in (workloads.short, workloads.long, workloads.code_edit, workloads.first_turn):
        assert make("a") == make("a")
        assert make("a") != make("b")
    assert all(64 <= workloads.short(str(seed)).max_tokens <= 128 for seed in range(200))


def test_servers_take_turns_round_by_round() -> None:
    order = [(number, server) for number, server, _ in plan.turns(plan.USUAL, ["ours", "vllm", "llama-cpp"])]
    assert order == [(number, server) for number in range(3) for server in ("ours", "llama-cpp", "vllm")]
