"""Calls over a socket between processes of one machine: answers, faults, and either side going away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_app.gateway import direct
from serve_app.gateway.coalesce import Unavailable


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("a lock: ", asyncio.Lock(), lambda: None)


class Other:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        methods = {"double": self.double, "wait": self.wait, "fail": self.fail, "odd": self.odd}
        self.server = direct.Server(methods)
        self.address = ""

    async def double(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]

    async def wait(self) -> str:
        await self.gate.wait()
        return "done"

    async def fail(self) -> None:
        raise ValueError("no such thing")

    async def odd(self) -> None:
        raise Unpicklable


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    other = Other()
    address = await other.server.address()
    assert address is not None
    other.address = address
    yield other
    other.gate.set()
    other.server.close()


async def connected(other: Other) -> direct.Connection:
    connection = await direct.connect(other.address)
    assert connection is not None
    return connection


async def test_an_answer_comes_to_the_call_that_asked(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.call("wait"))
    assert await asyncio.gather(*(connection.call("double", [n]) for n in range(50))) == [[2 * n] for n in range(50)]
    assert not waiting.done()
    other.gate.set()
    assert await waiting == "done"


async def test_a_list_of_any_length_arrives_whole(other: Other) -> None:
    values = list(range(500_000))
    assert await (await connected(other)).call("double", values) == [2 * value for value in values]


async def test_what_the_other_side_raises_is_raised(other: Other) -> None:
    connection = await connected(other)
    with pytest.raises(ValueError, match="no such thing"):
        await connection.call("fail")
    with pytest.raises(RuntimeError, match="Unpicklable"):
        await connection.call("odd")
    assert await connection.call("double", [1]) == [2]


async def test_calls_in_flight_end_when_the_other_side_goes_away(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.call("wait"))
    await asyncio.sleep(0)
    other.server.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await connection.call("double", [1])
    assert not connection.is_open
    assert await direct.connect(other.address) is None


async def test_a_caller_that_gives_up_leaves_the_connection_as_it_was(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.call("wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other.gate.set()
    assert await connection.call("double", [3]) == [6]


async def test_a_connection_that_is_given_up_answers_what_it_was_asked_before(other: Other) -> None:
    connection = await connected(other)
    waiting = asyncio.ensure_future(connection.call("wait"))
    await asyncio.sleep(0)
    connection.retire()
    other.gate.set()
    assert await waiting == "done"
    assert not connection.is_open


async def test_an_address_that_is_not_there_is_none() -> None:
    assert await direct.connect("serve-app-nobody") is None


async def test_a_process_of_another_user_is_not_heard(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.gateway.direct.os.geteuid", lambda: 4_000_000)
    assert await direct.connect(other.address) is None
