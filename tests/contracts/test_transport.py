"""Calls over a connection: answers, faults, and either side going away."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from deployments import transport
from deployments.direct_calls import Connection, Server
from deployments.transport import Address, connect
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import FindUnsettled, GetAccount
from serve_app.contracts.errors import AccountNotFound, LedgerUnavailable
from serve_app.contracts.limiting import Identify, Recovering, Release, UnknownKey


class Other:
    """The other process; answers FindUnsettled with its ids, once the gate is open if it has none."""

    def __init__(self, host: str) -> None:
        self.gate = asyncio.Event()
        self.server = Server(self.answer, host)

    async def answer(self, call: Any) -> Any:
        match call:
            case FindUnsettled(("beyond 64 bits",)):
                return [2**70]
            case FindUnsettled(("another type",)):
                return [{"of": "a later release"}]
            case FindUnsettled(request_ids):
                await (asyncio.sleep(0) if request_ids else self.gate.wait())
                return list(request_ids)
            case GetAccount("fault"):
                raise ValueError("no such thing")
            case GetAccount("returned"):
                return AccountNotFound("returned")
            case GetAccount("odd"):
                raise AccountNotFound(asyncio.Lock())
            case GetAccount(account_id):
                raise AccountNotFound(account_id)
        return [UnknownKey("", ask.key_digest) if isinstance(ask, Identify) else None for ask in call]

    async def connect(self) -> Connection:
        return await connect(await self.server.address(), Connection)


WAIT = FindUnsettled(())


@pytest.fixture(params=["", "127.0.0.1"], ids=["a local socket", "TCP"])
async def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Other]:
    if request.param:
        monkeypatch.setattr(transport, "_IS_LINUX", False)
    other = Other(request.param)
    yield other
    other.gate.set()
    other.server.close()


async def test_each_call_gets_its_own_answer(other: Other) -> None:
    connection = await other.connect()
    waiting = asyncio.ensure_future(connection.send(WAIT))
    asked = [connection.send(FindUnsettled((str(number),))) for number in range(50)]
    assert await asyncio.gather(*asked) == [[str(number)] for number in range(50)]
    assert not waiting.done()
    other.gate.set()
    assert await waiting == []


async def test_asks_are_answered_in_their_order(other: Other) -> None:
    connection = await other.connect()
    asks = [Identify("a"), Release("r", 1, 2), Identify("b")]
    assert await connection.send(asks) == [UnknownKey("", "a"), None, UnknownKey("", "b")]


async def test_a_list_of_any_length_arrives_whole(other: Other) -> None:
    ids = [str(number) for number in range(200_000)]
    assert await (await other.connect()).send(FindUnsettled(tuple(ids))) == ids


async def test_an_error_of_the_other_side_is_raised_here(other: Other) -> None:
    connection = await other.connect()
    asked = [connection.send(GetAccount(name)) for name in ("acct-1", "returned", "fault", "odd")]
    errors = [repr(error) for error in await asyncio.gather(*asked, return_exceptions=True)]
    assert errors[:3] == [
        "AccountNotFound('acct-1')",
        "AccountNotFound('returned')",
        "RuntimeError('ValueError: no such thing')",
    ]
    assert errors[3].startswith("RuntimeError")
    assert "AccountNotFound" in errors[3]
    assert await connection.send(FindUnsettled(("1",))) == ["1"]


async def test_an_error_in_place_of_an_answer_arrives_as_one(other: Other) -> None:
    async def answer(_: Any) -> Any:
        return [LedgerUnavailable("the disk is full"), Recovering("r", 0.5)]

    other.server.answer = answer
    failed, recovering = await (await other.connect()).send([Identify("a"), Identify("b")])
    assert isinstance(failed, LedgerUnavailable)
    assert str(failed) == "the disk is full"
    assert recovering == Recovering("r", 0.5)


async def test_calls_in_flight_end_when_the_other_side_goes_away(other: Other) -> None:
    connection = await other.connect()
    waiting = asyncio.ensure_future(connection.send(WAIT))
    await connection.send(FindUnsettled(("1",)))  # so the other side has accepted
    other.server.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await connection.send(WAIT)
    assert not connection.is_open
    with pytest.raises(ConnectionRefusedError):
        await other.connect()


async def test_a_server_that_was_closed_does_not_begin_to_listen(other: Other) -> None:
    other.server.close()
    with pytest.raises(ConnectionAbortedError):
        await other.server.address()


async def test_a_caller_that_gives_up_leaves_the_connection_as_it_was(other: Other) -> None:
    connection = await other.connect()
    waiting = asyncio.ensure_future(connection.send(WAIT))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other.gate.set()
    assert await connection.send(FindUnsettled(("3",))) == ["3"]


async def test_a_retired_connection_completes_the_calls_in_flight(other: Other) -> None:
    connection = await other.connect()
    waiting = asyncio.ensure_future(connection.send(WAIT))
    await asyncio.sleep(0)
    connection.retire()
    other.gate.set()
    assert await waiting == []
    assert not connection.is_open


async def test_nobody_is_answered_without_the_token(other: Other, caplog: pytest.LogCaptureFixture) -> None:
    forged = replace(await other.server.address(), token="0" * 64)
    with pytest.raises(Unavailable):
        await (await connect(forged, Connection)).send(FindUnsettled(("1",)))
    assert "without the right token" in caplog.text


async def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other("")
    monkeypatch.setattr("deployments.transport.os.geteuid", lambda: 4_000_000)
    with pytest.raises(OSError, match="another user"):
        await other.connect()
    other.server.close()


@pytest.mark.parametrize("odd", ["beyond 64 bits", "another type"])
async def test_an_answer_that_does_not_arrive_is_unavailable(other: Other, odd: str) -> None:
    connection = await other.connect()
    with pytest.raises(Unavailable, match="the answer can't be"):
        await connection.send(FindUnsettled((odd,)))
    assert await connection.send(FindUnsettled(("1",))) == ["1"]


async def test_a_process_that_ends_first_answers_the_calls_that_run(other: Other) -> None:
    connection = await other.connect()
    waiting = asyncio.ensure_future(connection.send(WAIT))
    await connection.send(FindUnsettled(("1",)))
    ending = asyncio.ensure_future(other.server.finish(60))
    await asyncio.sleep(0)
    assert not ending.done()
    other.gate.set()
    await ending
    other.server.close()
    assert await waiting == []


async def test_nothing_is_read_after_a_wrong_token(other: Other) -> None:
    class Heard(transport.Incoming):
        messages: ClassVar[list[bytes]] = []

        def message_received(self, frame: bytes) -> None:
            self.messages.append(frame)

    class Closed:
        def abort(self) -> None:
            """The end of the connection is reported in a later turn of the loop."""

    incoming = Heard(other.server)
    incoming._transport = Closed()  # type: ignore[assignment]
    frames = b"wrong", other.server.token.encode(), b"a call"
    incoming.data_received(b"".join(struct.pack("!I", len(frame)) + frame for frame in frames))
    assert Heard.messages == []
    assert not incoming.is_open


async def test_connections_without_a_token_are_few(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await other.connect()
    assert await known.send(FindUnsettled(("1",))) == ["1"]
    monkeypatch.setattr(transport, "MAX_STRANGERS", 2)
    monkeypatch.setattr(Connection, "connection_made", lambda line, made: setattr(line, "_transport", made))
    silent = [await other.connect() for _ in range(3)]
    while all(one.is_open for one in silent):
        await asyncio.sleep(0.001)
    assert sum(one.is_open for one in silent) == 2
    assert known.is_open
    for one in silent:
        one.close()


async def test_a_first_caller_that_gives_up_does_not_keep_others_from_connecting(other: Other) -> None:
    for turns in range(6):
        first = asyncio.ensure_future(other.server.address())
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
    assert await (await other.connect()).send(FindUnsettled(("1",))) == ["1"]


async def test_a_listener_that_could_not_listen_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    other, made = Other("127.0.0.1"), transport.cluster_tls
    monkeypatch.setattr(transport, "cluster_tls", lambda: open("/certificates/are/being/replaced"))  # noqa: SIM115
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await other.server.address()
    monkeypatch.setattr(transport, "cluster_tls", made)
    assert await (await other.connect()).send(FindUnsettled(("1",))) == ["1"]
    other.server.close()


async def test_an_impostor_on_the_callers_machine_does_not_keep_it_from_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Other("127.0.0.1")
    address = await other.server.address()
    is_same_user = transport._is_same_user
    local = socket.AF_UNIX
    monkeypatch.setattr(
        transport,
        "_is_same_user",
        lambda made: made.get_extra_info("socket").family != local and is_same_user(made),
    )
    connection = await connect(address, Connection)
    assert await connection.send(FindUnsettled(("1",))) == ["1"]
    other.server.close()


def test_an_address_of_a_later_release_has_what_this_one_knows() -> None:
    address = object.__new__(Address)
    address.__setstate__(["a", "10.0.0.1", 5, "t", "of a later release"])  # type: ignore[attr-defined]
    assert address == Address("a", "10.0.0.1", 5, "t")
    assert pickle.loads(pickle.dumps(address)) == address
