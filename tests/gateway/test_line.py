"""A line takes the socket only where and while Serve says that the replica is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.gateway import direct, line, tasks
from serve_app.gateway.coalesce import Unavailable


class Replica:
    """One process behind a line; `name` is what it answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server = direct.Server({"who": self.who})

    async def who(self) -> str:
        return f"{self.name}, over the socket"


class Serve:
    """Routes to one replica at a time."""

    def __init__(self, replica: Replica) -> None:
        self.replica: Replica | None = replica
        self.sockets = True
        self.now = 100.0
        self.line = line.Line(self.call, clock=lambda: self.now)

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.replica is None:
            raise Unavailable("no replica")
        if method == "address":
            return await self.replica.server.address() if self.sockets else None
        return f"{self.replica.name}, through Serve"

    async def who(self) -> str:
        answer: str = await self.line.call("who")
        await tasks.finished(5)  # what the call has begun in the background
        return answer


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    replica = Replica("first")
    serve = Serve(replica)
    yield serve
    replica.server.close()


async def connected(serve: Serve) -> None:
    await serve.who()
    await serve.who()
    assert await serve.who() == "first, over the socket"


async def test_a_line_that_is_used_again_and_again_goes_over_the_socket(serve: Serve) -> None:
    assert await serve.who() == "first, through Serve"
    assert not serve.replica or not serve.replica.server.connections  # nothing was opened for a line that is used once
    assert await serve.who() == "first, through Serve"
    assert await serve.who() == "first, over the socket"


async def test_without_an_address_all_calls_go_through_serve(serve: Serve) -> None:
    serve.sockets = False
    for _ in range(3):
        assert await serve.who() == "first, through Serve"
        serve.now += line.CONFIRM_S


async def test_a_replaced_replica_is_not_asked_any_more_although_it_lives(serve: Serve) -> None:
    await connected(serve)
    serve.replica = Replica("second")
    serve.now += line.CONFIRM_S
    await serve.who()  # finds out, in the background
    assert await serve.who() == "second, over the socket"
    serve.replica.server.close()


async def test_a_connection_that_was_not_confirmed_lately_is_not_used(serve: Serve) -> None:
    await connected(serve)
    serve.replica = Replica("second")
    serve.now += line.TRUST_S
    assert await serve.who() == "second, through Serve"
    serve.replica.server.close()


async def test_while_serve_knows_no_replica_the_old_one_is_not_asked(serve: Serve) -> None:
    await connected(serve)
    serve.replica = None
    serve.now += line.CONFIRM_S
    await serve.who()
    with pytest.raises(Unavailable):
        await serve.who()


async def test_a_replica_that_dies_is_asked_through_serve_at_once(serve: Serve) -> None:
    await connected(serve)
    assert serve.replica is not None
    serve.replica.server.close()
    await asyncio.sleep(0.01)
    assert await serve.who() == "first, through Serve"
