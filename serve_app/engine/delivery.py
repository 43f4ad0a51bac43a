"""Hands events from the engine's thread to whoever waits for them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from serve_app.engine.request import Delta, Event

logger = logging.getLogger(__name__)


class LoopSink:
    """Events of one request on their way to a coroutine of `loop`.

    Deltas that come within `interval_s()` seconds of the last one are joined before they leave the engine's thread:
    whoever waits is woken a few times a second, not once a token. The first one and every other event goes at once.
    """

    __slots__ = ("events", "interval_s", "loop", "sent_at", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: Callable[[], float] = lambda: 0.0) -> None:
        self.loop = loop
        self.interval_s = interval_s
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.waiting: list[Event] = []
        self.sent_at = -math.inf  # when the last delta went

    def add(self, event: Event) -> None:
        """Keep an event; a delta becomes part of the one before it."""
        last = self.waiting[-1] if self.waiting else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            self.waiting[-1] = Delta(last.text + event.text, event.completion_tokens, last.tokens + event.tokens)
        else:
            self.waiting.append(event)

    def is_due(self, now: float) -> bool:
        """Whether what is kept should go now."""
        only_a_delta = len(self.waiting) == 1 and isinstance(self.waiting[0], Delta)
        return not only_a_delta or now - self.sent_at >= self.interval_s()

    def take(self, now: float) -> list[Event]:
        """All that is kept, in order."""
        events, self.waiting = self.waiting, []
        if any(isinstance(event, Delta) for event in events):
            self.sent_at = now
        return events


Sink = Callable[[Event], None] | LoopSink


class Outbox:
    """Collects a step's events and delivers them. Belongs to the engine's thread.

    `on_lost(request_id)` is called for a request whose receiver is gone or has raised.
    """

    def __init__(self, on_lost: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_lost = on_lost
        self._clock = clock
        self._pending: list[tuple[str, Callable[[Event], None], Event]] = []
        self._sinks: dict[LoopSink, str] = {}  # those with something to deliver, and their requests

    def put(self, request_id: str, sink: Sink, event: Event) -> None:
        """Keep an event for the next delivery."""
        if isinstance(sink, LoopSink):
            sink.add(event)
            self._sinks[sink] = request_id
        else:
            self._pending.append((request_id, sink, event))

    def deliver(self) -> None:
        """Deliver in order what is due; a loop is woken once for all its events: each wake-up is a system call."""
        pending, self._pending = self._pending, []
        for request_id, receive, event in pending:
            try:
                receive(event)
            except Exception:
                logger.exception("The receiver of request %s failed; the request is aborted.", request_id)
                self._on_lost(request_id)
        if not self._sinks:
            return
        now = self._clock()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[str, LoopSink, list[Event]]]] = {}
        for sink, request_id in list(self._sinks.items()):
            if sink.is_due(now):
                by_loop.setdefault(sink.loop, []).append((request_id, sink, sink.take(now)))
                del self._sinks[sink]
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed
                for request_id, _, _ in batch:
                    self._on_lost(request_id)


def _put_all(batch: list[tuple[str, LoopSink, list[Event]]]) -> None:
    for _, sink, events in batch:
        for event in events:
            sink.events.put_nowait(event)
