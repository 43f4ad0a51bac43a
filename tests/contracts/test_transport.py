"""Calls over a socket between processes of one machine: answers, faults, and either side going away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments import transport
from serve_app.contracts.calls import Unavailable


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("a lock: ", asyncio.Lock(), lambda: None)


class Other:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.server = transport.Server(self.answer)
        self.address = ""

    async def answer(self, message: str | list[int]) -> str | list[int]:
        """Doubles numbers; a word selects another action."""
        if isinstance(message, list):
            return [2 * value for value in message]
        if message == "fail":
            raise ValueError("no such thing")
        if message == "odd":
            raise Unpicklable
        await self.gate.wait()
        return "done"


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    other = Other()
    address = await other.server.address()
    assert address is not None
    other.address = address
    yield other
    other.gate.set()
    other.server.close()


async def connected(other: Other) -> transport.Connection:
    connection = await transport.connect(other.address)
    assert connection is not None
    return connection


async def test_each_call_gets_its_own_result(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.send("wait"))
    assert await asyncio.gather(*(connection.send([n]) for n in range(50))) == [[2 * n] for n in range(50)]
    assert not waiting.done()
    other.gate.set()
    assert await waiting == "done"


async def test_a_list_of_any_length_arrives_whole(other: Other) -> None:
    values = list(range(500_000))
    assert await (await connected(other)).send(values) == [2 * value for value in values]


async def test_an_error_of_the_other_side_is_raised_here(other: Other) -> None:
    connection = await connected(other)
    with pytest.raises(ValueError, match="no such thing"):
        await connection.send("fail")
    with pytest.raises(RuntimeError, match="Unpicklable"):
        await connection.send("odd")
    assert await connection.send([1]) == [2]


async def test_calls_in_flight_end_when_the_other_side_goes_away(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.send("wait"))
    await asyncio.sleep(0)
    other.server.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await connection.send([1])
    assert not connection.is_open
    assert await transport.connect(other.address) is None


async def test_a_caller_that_gives_up_leaves_the_connection_as_it_was(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.send("wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other.gate.set()
    assert await connection.send([3]) == [6]


async def test_a_retired_connection_completes_the_calls_in_flight(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.send("wait"))
    await asyncio.sleep(0)
    connection.retire()
    other.gate.set()
    assert await waiting == "done"
    assert not connection.is_open


async def test_connecting_to_an_unknown_address_returns_none() -> None:
    assert await transport.connect("serve-app-nobody") is None


async def test_a_process_of_another_user_is_refused(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.transport.os.geteuid", lambda: 4_000_000)
    assert await transport.connect(other.address) is None
