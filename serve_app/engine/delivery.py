"""Delivers events from the engine's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.contracts.generation import Event
from serve_app.contracts.inbox import Inbox, Turns


class LoopSink:
    """The events of one request on their way to a coroutine of `loop`."""

    __slots__ = ("events", "loop", "refusal")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.events: Inbox[Event] = Inbox(loop)
        self.refusal: Exception | None = None  # the reason if the engine has ended the request without running it


class Outbox:
    """Collects a step's events and delivers them. Belongs to the engine's thread.

    `on_lost(request_id)` is called for a request whose loop is closed.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._waiting: list[tuple[LoopSink, Event]] = []
        self._requests: dict[LoopSink, str] = {}  # request ids of the waiting events
        self._turns: dict[asyncio.AbstractEventLoop, Turns[LoopSink, Event]] = {}

    def put(self, request_id: str, sink: LoopSink, event: Event) -> None:
        """Store an event for the next delivery."""
        self._waiting.append((sink, event))
        self._requests[sink] = request_id

    def deliver(self) -> None:
        """Send the stored events, in order. Wakes each loop only once, because a wake-up is a system call."""
        (waiting, self._waiting), (requests, self._requests) = (self._waiting, []), (self._requests, {})
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[LoopSink, Event]]] = {}
        for entry in waiting:
            by_loop.setdefault(entry[0].loop, []).append(entry)
        for loop, batch in by_loop.items():
            if (turns := self._turns.get(loop)) is None:
                turns = self._turns[loop] = Turns(loop, _hand_out)
            try:
                loop.call_soon_threadsafe(turns.add, batch)
            except RuntimeError:  # the loop is closed
                del self._turns[loop]
                for sink in dict.fromkeys(sink for sink, _ in batch):
                    self._on_lost(requests[sink])


def _hand_out(sink: LoopSink, events: list[Event]) -> None:
    for event in events:
        sink.events.put(event)
