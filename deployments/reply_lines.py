"""Brings the events of replies from replicas to gateways: one connection for each pair of processes.

A gateway calls a replica through Serve. Serve chooses the replica, counts the call as open while the reply runs, and
reports failures. The events use another connection: a replica sends all events of a step to a gateway in one frame, an
array of (reply number, event).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from deployments.transport import Address, Incoming, Listener, Outgoing, connect
from serve_app.contracts.generation import BackendEvent, Finished, Rejected
from serve_app.contracts.inbox import Turns
from serve_app.contracts.messages import set_state

logger = logging.getLogger("ray.serve")

FULL_BYTES: Final = 1024 * 1024  # bytes; a longer frame is split if it has several events
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024  # maximum bytes of events that a gateway has not read
#: (reply number, event). None in place of an event: the reply ends here, although it is not complete.
_Frame = list[tuple[int, BackendEvent | None]]
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Frame)
_raw_decoder: Final = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_event_decoder: Final = msgspec.msgpack.Decoder(BackendEvent | None)


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The address and the number to which a replica sends the events of a reply."""

    address: Address
    number: int  # of the reply; unique at this address

    __setstate__ = set_state


class OpenReply:
    """A reply whose events are passed to `take`. `over` is done when no more events follow."""

    def __init__(self, number: int, take: Callable[[BackendEvent], None]) -> None:
        self.number = number
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False  # an event has arrived
        self.is_complete = False  # its last event has arrived
        self._take = take

    def arrived(self, events: list[BackendEvent | None]) -> None:
        self.has_begun = True
        for event in events:
            if self.over.done():
                return
            if event is not None:
                self._take(event)
            if event is None or isinstance(event, Finished | Rejected):
                self.is_complete = event is not None
                self.end()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class ReplyListener(Listener):
    """Accepts the connections of replicas."""

    def __init__(self, host: str = "") -> None:
        super().__init__(host)
        self.replies: dict[int, OpenReply] = {}
        self._numbers = itertools.count()

    def incoming(self) -> Incoming:
        return _Events(self)

    async def open(self, take: Callable[[BackendEvent], None]) -> tuple[OpenReply, ReplyTo]:
        """Returns a reply, and the destination for its replica. Call `close_reply` at its end."""
        address = await self.address()
        reply = OpenReply(next(self._numbers), take)
        self.replies[reply.number] = reply
        return reply, ReplyTo(address, reply.number)

    def close_reply(self, reply: OpenReply) -> None:
        """Closes a reply. Events of it that still arrive are dropped."""
        self.replies.pop(reply.number, None)


class _Events(Incoming):
    """The gateway's end of a replica's connection."""

    _listener: ReplyListener

    def __init__(self, listener: ReplyListener) -> None:
        super().__init__(listener)
        self._numbers: set[int] = set()  # open replies of this replica
        self._turns = Turns(asyncio.get_running_loop(), self._hand_out)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._turns.finish()
        for number in self._numbers:
            if (reply := self._listener.replies.get(number)) is not None:
                reply.end()

    def message_received(self, frame: bytes) -> None:
        try:
            events = _decoder.decode(frame)
        except msgspec.DecodeError:
            events = _readable(frame)
        self._turns.add(events)

    def _hand_out(self, number: int, events: list[BackendEvent | None]) -> None:
        reply = self._listener.replies.get(number)
        if reply is None:  # the reply was closed
            self._numbers.discard(number)
            return
        self._numbers.add(number)
        try:
            reply.arrived(events)
        except Exception:
            logger.exception("an event of a reply could not be processed")
            reply.end()
        if reply.over.done():
            self._numbers.discard(number)


def _readable(frame: bytes) -> _Frame:
    """Returns the frame's events, with None for each that this release can't read. Raises msgspec.DecodeError."""
    events: _Frame = []
    for number, raw in _raw_decoder.decode(frame):
        try:
            events.append((number, _event_decoder.decode(raw)))
        except msgspec.DecodeError as error:
            logger.error("an event of a reply can't be read, so the reply ends: %s", error)
            events.append((number, None))
    return events


class ReplyLine(Outgoing):
    """A replica's connection to a gateway. Events of one iteration of the event loop are sent in one frame."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.on_lost: set[Callable[[], None]] = set()
        self._events: list[tuple[int, BackendEvent | None]] = []
        self._loop = asyncio.get_running_loop()

    def send(self, number: int, event: BackendEvent | None) -> None:
        """Sends an event of a reply. None means that no more events follow."""
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append((number, event))

    def frame_received(self, frame: bytes) -> None:
        """Ignores the frame: gateways send none."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for lost in list(self.on_lost):
            lost()

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._write_events(events)
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            logger.error("a gateway does not read the events of its replies: the connection is closed")
            self.close()

    def _write_events(self, events: _Frame) -> None:
        try:
            data = _encoder.encode(events)
        except (TypeError, ValueError, OverflowError):
            if len(events) > 1:
                self._write_halves(events)
                return
            logger.exception("an event of a reply can't be sent, so the reply ends")
            data = _encoder.encode([(events[0][0], None)])
        if len(data) > FULL_BYTES and len(events) > 1:
            self._write_halves(events)
        else:
            self.write(data)

    def _write_halves(self, events: _Frame) -> None:
        half = len(events) // 2
        self._write_events(events[:half])
        self._write_events(events[half:])


class ReplyLines:
    """The connections of a replica's process, by the gateway's address."""

    def __init__(self) -> None:
        self._lines: dict[Address, asyncio.Task[ReplyLine]] = {}

    async def to(self, address: Address) -> ReplyLine:
        """Returns the open connection, or opens one. Raises OSError if the gateway can't be reached."""
        making = self._lines.get(address)
        if making is None or (making.done() and not _is_usable(making)):
            making = self._lines[address] = asyncio.create_task(connect(address, ReplyLine))
            making.add_done_callback(lambda made: self._forget(address, made))
        return await asyncio.shield(making)

    def _forget(self, address: Address, made: asyncio.Task[ReplyLine]) -> None:
        """Forgets a connection once it is lost: a gateway that has ended never uses its address again."""

        def drop() -> None:
            if self._lines.get(address) is made:
                del self._lines[address]

        if made.cancelled() or made.exception() is not None:
            drop()
        else:
            made.result().on_lost.add(drop)


_lines: Final = ReplyLines()


async def send_events(events: AsyncGenerator[BackendEvent, None], to: ReplyTo) -> str | None:
    """Sends the events of a reply to its gateway. Closes `events` if the connection to the gateway is lost.

    Returns the reason if the gateway could not be reached or was lost, else None. Raises an exception of `events` after
    sending the events before it.
    """
    async with contextlib.aclosing(events):
        try:
            line = await _lines.to(to.address)
        except OSError as error:
            return f"the gateway can't be reached at {to.address.host or 'its socket'}: {error}"
        task = asyncio.current_task()
        assert task is not None
        is_lost = is_complete = False

        def lost() -> None:
            nonlocal is_lost
            is_lost = True
            task.cancel()

        line.on_lost.add(lost)
        try:
            if not line.is_open:
                return "the connection to the gateway is lost"
            async for event in events:
                line.send(to.number, event)
                is_complete = isinstance(event, Finished | Rejected)
        except asyncio.CancelledError:
            await events.aclose()
            if not is_lost or task.uncancel():
                raise
            return "the connection to the gateway is lost"
        finally:
            line.on_lost.discard(lost)
            if not is_complete:
                line.send(to.number, None)
    return None


def _is_usable(made: asyncio.Task[ReplyLine]) -> bool:
    return not made.cancelled() and made.exception() is None and made.result().is_open
