"""The events of replies cross from replicas to gateways: in order, to the right reply, and from nobody else."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployments import reply_lines, transport
from deployments.reply_lines import OpenReply, ReplyListener, ReplyTo, send_events
from serve_app.certificates import make_authority
from serve_app.cli.node_certificates import FILES, make_own
from serve_app.contracts.generation import BackendEvent, Delta, Finished, FinishReason, Started
from serve_app.contracts.inbox import KEYS_PER_TURN

END = Finished(FinishReason.STOP, 1, 0, 3)


class Reply:
    """One reply at the gateway."""

    def __init__(self) -> None:
        self.events: list[BackendEvent] = []

    async def open(self, listener: ReplyListener) -> Reply:
        self.opened, self.to = await listener.open(self.events.append)
        return self

    async def over(self) -> OpenReply:
        await asyncio.wait_for(self.opened.over, 20)
        return self.opened


class Says:
    """A replica's generator: says the steps, and waits or fails where the test says so."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.is_closed = False

    async def events(self) -> AsyncGenerator[BackendEvent, None]:
        try:
            for step in self.steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.is_closed = True


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_lines, "_lines", reply_lines.ReplyLines())


@pytest.fixture(params=["", "127.0.0.1"], ids=["a local socket", "TCP"])
async def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReplyListener]:
    if request.param:
        monkeypatch.setattr(transport, "_IS_LINUX", False)
    made = ReplyListener(request.param)
    yield made
    made.close()


async def test_events_arrive_in_order_at_their_reply(listener: ReplyListener) -> None:
    replies = [await Reply().open(listener) for _ in range(50)]
    said = [[Started(1, 0), *(Delta(f"{number} {count}", count) for count in range(1, 4)), END] for number in range(50)]
    ended = [send_events(Says(*events).events(), reply.to) for reply, events in zip(replies, said, strict=True)]
    assert set(await asyncio.gather(*ended)) == {None}
    for reply, events in zip(replies, said, strict=True):
        assert (await reply.over()).is_complete
        assert reply.events == events
    assert len(listener.connections) == 1


async def test_the_events_of_one_turn_travel_in_one_frame(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[int] = []
    written = reply_lines.ReplyLine.write
    monkeypatch.setattr(reply_lines.ReplyLine, "write", lambda line, data: (frames.append(1), written(line, data)))
    gate = asyncio.Event()
    replies = [await Reply().open(listener) for _ in range(20)]
    sending = [asyncio.ensure_future(send_events(Says(Started(1, 0), gate, END).events(), one.to)) for one in replies]
    while not all(reply.events for reply in replies):
        await asyncio.sleep(0.001)
    frames.clear()
    gate.set()
    await asyncio.gather(*sending)
    for reply in replies:
        await reply.over()
    assert len(frames) == 1


async def test_an_event_that_cannot_be_sent_ends_its_own_reply_alone(listener: ReplyListener) -> None:
    gate = asyncio.Event()
    replies = [await Reply().open(listener) for _ in range(3)]
    texts = "a", "half of a pair: \ud800", "c"
    said = [Says(Started(1, 0), gate, Delta(text, 1), END).events() for text in texts]
    sending = [asyncio.ensure_future(send_events(one, reply.to)) for one, reply in zip(said, replies, strict=True)]
    while not all(reply.events for reply in replies):
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*sending)
    for number in (0, 2):
        assert (await replies[number].over()).is_complete
        assert replies[number].events == [Started(1, 0), Delta(texts[number], 1), END]
    await replies[1].over()
    assert replies[1].events == [Started(1, 0)]
    assert not replies[1].opened.is_complete


async def test_a_failure_comes_after_the_events_before_it(listener: ReplyListener) -> None:
    reply = await Reply().open(listener)
    with pytest.raises(ValueError, match="fault"):
        await send_events(Says(Started(1, 0), Delta("a", 1), ValueError("fault")).events(), reply.to)
    assert not (await reply.over()).is_complete
    assert reply.events == [Started(1, 0), Delta("a", 1)]


async def test_a_gateway_that_ends_stops_the_model(listener: ReplyListener) -> None:
    reply, says = await Reply().open(listener), Says(Started(1, 0), asyncio.Event())
    sending = asyncio.ensure_future(send_events(says.events(), reply.to))
    while not reply.events:
        await asyncio.sleep(0.001)
    listener.close()
    assert await asyncio.wait_for(sending, 20) == "the connection to the gateway is lost"
    assert says.is_closed
    assert not (await reply.over()).is_complete


async def test_a_call_that_is_cancelled_stops_the_model_and_not_the_others(listener: ReplyListener) -> None:
    gate = asyncio.Event()
    cut, kept = await Reply().open(listener), await Reply().open(listener)
    says = Says(Started(1, 0), asyncio.Event())
    cutting = asyncio.ensure_future(send_events(says.events(), cut.to))
    keeping = asyncio.ensure_future(send_events(Says(Started(1, 0), gate, END).events(), kept.to))
    while not (cut.events and kept.events):
        await asyncio.sleep(0.001)
    cutting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cutting
    assert says.is_closed
    gate.set()
    assert await keeping is None
    assert (await kept.over()).is_complete


async def test_a_gateway_that_is_gone_is_reported_and_nothing_runs(listener: ReplyListener) -> None:
    reply, says = await Reply().open(listener), Says(Started(1, 0))
    listener.close()
    await asyncio.sleep(0.01)
    assert "can't be reached" in str(await send_events(says.events(), reply.to))
    assert not reply.events


async def test_events_for_a_reply_that_nobody_waits_for_are_dropped(listener: ReplyListener) -> None:
    reply, other = await Reply().open(listener), await Reply().open(listener)
    listener.close_reply(reply.opened)
    assert await send_events(Says(Started(1, 0), END).events(), reply.to) is None
    assert await send_events(Says(Started(1, 0), END).events(), other.to) is None
    await other.over()
    assert reply.events == []


async def test_nobody_is_heard_without_the_token(listener: ReplyListener, caplog: pytest.LogCaptureFixture) -> None:
    reply = await Reply().open(listener)
    forged = ReplyTo(replace(reply.to.address, token="0" * 64), reply.to.number)
    says = Says(Started(1, 0), asyncio.Event())
    assert await asyncio.wait_for(send_events(says.events(), forged), 20) is not None
    assert "without the right token" in caplog.text
    assert reply.events == []


async def test_a_first_frame_that_is_too_long_to_be_a_token_is_refused(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await Reply().open(listener)
    monkeypatch.setattr(reply_lines.ReplyLine, "connection_made", _claims(2**30))
    says = Says(Started(1, 0), asyncio.Event())
    assert await asyncio.wait_for(send_events(says.events(), reply.to), 20) is not None
    assert reply.events == []


def _claims(length: int) -> Callable[[Any, Any], None]:
    def connection_made(line: Any, transport: Any) -> None:
        line._transport = transport
        transport.write(struct.pack("!I", length) + b"x")

    return connection_made


async def test_frames_are_read_wherever_they_are_cut() -> None:
    listener = ReplyListener()
    reply = await Reply().open(listener)
    incoming = reply_lines._Events(listener)
    incoming._transport = object()  # type: ignore[assignment]
    events: list[BackendEvent] = [Started(1, 0), *(Delta("x" * count, count) for count in range(1, 30)), END]
    frames = [listener.token.encode(), *(msgspec.msgpack.encode([(reply.to.number, event)]) for event in events)]
    data = b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)
    for at in range(0, len(data), 7):
        incoming.data_received(data[at : at + 7])
    assert reply.events == events
    listener.close()


async def test_a_process_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = ReplyListener()
    reply = await Reply().open(listener)
    monkeypatch.setattr(transport.os, "geteuid", lambda: 4711)
    says = Says(Started(1, 0), asyncio.Event())
    assert await asyncio.wait_for(send_events(says.events(), reply.to), 20) is not None
    assert "another user" in caplog.text
    assert reply.events == []
    listener.close()


class Tls:
    """Certificates of two clusters, in the environment as Ray has them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        now = datetime.now(UTC)
        for name in ("ours", "theirs"):
            (folder / name).mkdir()
            authority = make_authority("serve-app cluster", now)
            (folder / name / "ca.pem").write_bytes(authority.certificate_pem)
            (folder / name / "ca-key.pem").write_bytes(authority.key_pem)
            make_own(folder / name, folder / name / "node", ["127.0.0.1"], now)
        self._folder = folder
        monkeypatch.setenv("RAY_USE_TLS", "1")
        self.use("ours")

    def use(self, name: str, authority: str = "ours") -> None:
        for variable, file in FILES.items():
            self._monkeypatch.setenv(variable, str(self._folder / name / "node" / file))
        self._monkeypatch.setenv("RAY_TLS_CA_CERT", str(self._folder / authority / "ca.pem"))


async def test_between_machines_the_clusters_certificates_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_IS_LINUX", False)
    tls = Tls(tmp_path, monkeypatch)
    listener = ReplyListener("127.0.0.1")
    reply = await Reply().open(listener)
    assert await send_events(Says(Started(1, 0), END).events(), reply.to) is None
    assert (await reply.over()).is_complete
    assert [one._transport.get_extra_info("ssl_object").version() for one in listener.connections] == ["TLSv1.3"]

    stranger = await Reply().open(listener)
    monkeypatch.setattr(reply_lines, "_lines", reply_lines.ReplyLines())
    tls.use("theirs")  # a certificate of another authority
    assert await asyncio.wait_for(send_events(Says(asyncio.Event()).events(), stranger.to), 20) is not None
    monkeypatch.setattr(reply_lines, "_lines", reply_lines.ReplyLines())
    monkeypatch.setenv("RAY_USE_TLS", "0")  # plain text
    assert await asyncio.wait_for(send_events(Says(asyncio.Event()).events(), stranger.to), 20) is not None
    assert stranger.events == []
    listener.close()


async def test_events_that_are_too_long_for_one_frame_are_split(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_lines, "FULL_BYTES", 100)
    reply = await Reply().open(listener)
    events = [Started(1, 0), *(Delta("x" * 90, count) for count in range(1, 9)), END]
    assert await send_events(Says(*events).events(), reply.to) is None
    await reply.over()
    assert reply.events == events


async def test_a_connection_that_sends_no_token_is_closed(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CONNECT_S", 0.01)
    reply = await Reply().open(listener)
    monkeypatch.setattr(reply_lines.ReplyLine, "connection_made", lambda line, made: setattr(line, "_transport", made))
    sending = send_events(Says(asyncio.Event()).events(), reply.to)
    assert await asyncio.wait_for(sending, 20) == "the connection to the gateway is lost"


async def test_a_gateway_forgets_the_replies_that_have_ended(listener: ReplyListener) -> None:
    for _ in range(3):
        reply = await Reply().open(listener)
        assert await send_events(Says(Started(1, 0), END).events(), reply.to) is None
        await reply.over()
        listener.close_reply(reply.opened)
    [connection] = listener.connections
    assert isinstance(connection, reply_lines._Events)
    assert connection._numbers == set()


async def test_an_event_of_a_later_release_ends_its_own_reply_alone(listener: ReplyListener) -> None:
    replies = [await Reply().open(listener) for _ in range(3)]
    line = await transport.connect(replies[0].to.address, reply_lines.ReplyLine)
    events = [Started(1, 0), ["Unheard", 1], Started(1, 0)]
    line.write(msgspec.msgpack.encode([(one.to.number, event) for one, event in zip(replies, events, strict=True)]))
    line.write(msgspec.msgpack.encode([(one.to.number, END) for one in replies]))
    assert [(await one.over()).is_complete for one in replies] == [True, False, True]
    assert replies[1].events == []


async def test_events_that_have_arrived_count_although_their_connection_has_ended() -> None:
    listener = ReplyListener()
    replies = [await Reply().open(listener) for _ in range(3 * KEYS_PER_TURN)]
    incoming = reply_lines._Events(listener)
    incoming._transport = object()  # type: ignore[assignment]
    begin, end = (msgspec.msgpack.encode([(one.to.number, event) for one in replies]) for event in (Started(1, 0), END))
    for frame in (listener.token.encode(), begin):
        incoming.data_received(struct.pack("!I", len(frame)) + frame)
    while not all(one.events for one in replies):
        await asyncio.sleep(0)
    incoming.data_received(struct.pack("!I", len(end)) + end)
    incoming.connection_lost(None)
    assert all([(await one.over()).is_complete for one in replies])
    listener.close()


async def test_a_connection_that_is_lost_at_once_stops_the_model(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, says = await Reply().open(listener), Says(Started(1, 0), asyncio.Event())
    to = reply_lines.ReplyLines.to

    async def lost(lines: reply_lines.ReplyLines, address: transport.Address) -> reply_lines.ReplyLine:
        line = await to(lines, address)
        line.close()
        await asyncio.sleep(0)
        return line

    monkeypatch.setattr(reply_lines.ReplyLines, "to", lost)
    assert await asyncio.wait_for(send_events(says.events(), reply.to), 20) == "the connection to the gateway is lost"
    assert reply.events == []


async def test_a_gateway_that_does_not_read_is_given_up(
    listener: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_lines, "MAX_WAITING_BYTES", 1_000_000)
    reply, gate = await Reply().open(listener), asyncio.Event()

    async def endless() -> AsyncGenerator[BackendEvent, None]:
        yield Started(1, 0)
        await gate.wait()
        while True:
            yield Delta("x" * 100_000, 1)
            await asyncio.sleep(0)

    sending = asyncio.ensure_future(send_events(endless(), reply.to))
    while not reply.events:
        await asyncio.sleep(0.001)
    [connection] = listener.connections
    connection._transport.pause_reading()  # type: ignore[union-attr]
    gate.set()
    assert await asyncio.wait_for(sending, 20) == "the connection to the gateway is lost"
