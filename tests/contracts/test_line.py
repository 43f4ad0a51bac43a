"""A line uses the socket only while Serve lists the replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments import direct_calls
from deployments.transport import Address
from serve_app.contracts import calls
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import FindUnsettled


class Replica:
    """One process behind a line; it returns its `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server = direct_calls.Server(self.who)

    async def who(self, _: FindUnsettled) -> list[str]:
        return [f"{self.name}, over the socket"]


class Serve:
    """Routes to one replica at a time."""

    def __init__(self, replica: Replica) -> None:
        self.replica: Replica | None = replica
        self.sockets = True
        self.earlier_release = False
        self.now = 100.0
        self.line = direct_calls.Line(self.call, self.address, clock=lambda: self.now)

    async def call(self, _: FindUnsettled) -> list[str]:
        if self.replica is None:
            raise Unavailable("no replica")
        return [f"{self.replica.name}, through Serve"]

    async def address(self) -> Address | str | None:
        if self.earlier_release:
            return "serve-app-0123"
        if self.replica is None:
            raise Unavailable("no replica")
        return await self.replica.server.address() if self.sockets else None

    async def who(self) -> str:
        [answer] = await self.line.send(FindUnsettled(()))
        await calls.wait_for_background(60)  # what the call has begun in the background
        return str(answer)


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    monkeypatch.setattr(direct_calls, "TIMEOUT_S", 60.0)
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
    assert not serve.replica or not serve.replica.server.connections  # a line that is used once opens no connection
    assert await serve.who() == "first, through Serve"
    assert await serve.who() == "first, over the socket"


async def test_without_an_address_all_calls_go_through_serve(serve: Serve) -> None:
    serve.sockets = False
    for _ in range(3):
        assert await serve.who() == "first, through Serve"
        serve.now += direct_calls.CONFIRM_S


async def test_a_replica_of_an_earlier_release_is_called_through_serve(serve: Serve) -> None:
    serve.earlier_release = True
    for _ in range(3):
        assert await serve.who() == "first, through Serve"
        serve.now += direct_calls.CONFIRM_S


@pytest.mark.parametrize("odd", ["\ud800", 5], ids=["half of a pair", "of another type"])
async def test_a_call_that_has_no_encoding_goes_through_serve(serve: Serve, odd: Any) -> None:
    await connected(serve)
    assert await serve.line.send(FindUnsettled((odd,))) == ["first, through Serve"]


async def test_a_replaced_replica_gets_no_more_calls_even_while_it_lives(serve: Serve) -> None:
    await connected(serve)
    serve.replica = Replica("second")
    serve.now += direct_calls.CONFIRM_S
    await serve.who()  # finds the replica, in the background
    assert await serve.who() == "second, over the socket"
    serve.replica.server.close()


async def test_a_connection_that_was_not_confirmed_lately_is_not_used(serve: Serve) -> None:
    await connected(serve)
    serve.replica = Replica("second")
    serve.now += direct_calls.TRUST_S
    assert await serve.who() == "second, through Serve"
    serve.replica.server.close()


async def test_while_serve_knows_no_replica_the_old_one_gets_no_calls(serve: Serve) -> None:
    await connected(serve)
    serve.replica = None
    serve.now += direct_calls.CONFIRM_S
    await serve.who()
    with pytest.raises(Unavailable):
        await serve.who()


async def test_after_a_replica_dies_calls_go_through_serve_at_once(serve: Serve) -> None:
    await connected(serve)
    assert serve.replica is not None
    serve.replica.server.close()
    connection = serve.line._connection
    assert connection is not None
    async with asyncio.timeout(60):
        while connection.is_open:
            await asyncio.sleep(0)
    assert await serve.who() == "first, through Serve"
