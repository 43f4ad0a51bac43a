"""Delivers events from the engine's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from serve_app.contracts.generation import Delta, Event


class LoopSink:
    """The events of one request on their way to a coroutine of `loop`.

    Deltas that arrive within `interval_s()` seconds of the last one are joined before they leave the engine's thread.
    So the coroutine wakes a few times a second, not for each token. The first text and all other events leave at once.
    """

    __slots__ = ("events", "interval_s", "loop", "refusal", "sent_at", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: Callable[[], float] = lambda: 0.0) -> None:
        self.loop = loop
        self.interval_s = interval_s
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.waiting: list[Event] = []
        self.sent_at = -math.inf  # time of the last delta
        self.refusal: Exception | None = None  # the reason if the engine has ended the request without running it

    def add(self, event: Event) -> None:
        """Store an event; a delta is joined with the delta before it."""
        last = self.waiting[-1] if self.waiting else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            tokens, ids = last.tokens + event.tokens, last.token_ids + event.token_ids
            self.waiting[-1] = Delta(last.text + event.text, event.completion_tokens, tokens, ids, event.is_last)
        else:
            self.waiting.append(event)

    def is_due(self, now: float) -> bool:
        only_a_delta = len(self.waiting) == 1 and isinstance(self.waiting[0], Delta)
        return not only_a_delta or now - self.sent_at >= self.interval_s()

    def pop_due(self, now: float) -> list[Event]:
        """Remove and return all stored events, in order."""
        events, self.waiting = self.waiting, []
        if any(isinstance(event, Delta) and event.text for event in events):
            self.sent_at = now
        return events


class Outbox:
    """Collects a step's events and delivers them. Belongs to the engine's thread.

    `on_lost(request_id)` is called for a request whose loop is closed.
    """

    def __init__(self, on_lost: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_lost = on_lost
        self._clock = clock
        self._sinks: dict[LoopSink, str] = {}  # sinks with events to deliver → their requests

    def put(self, request_id: str, sink: LoopSink, event: Event) -> None:
        """Store an event for the next delivery."""
        sink.add(event)
        self._sinks[sink] = request_id

    @property
    def has_events(self) -> bool:
        """Whether events are stored that were not yet due."""
        return bool(self._sinks)

    def deliver(self) -> None:
        """Send the events that are due, in order. Each wake-up is a system call, so each loop is woken once."""
        if not self._sinks:
            return
        now = self._clock()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[str, LoopSink, list[Event]]]] = {}
        for sink, request_id in list(self._sinks.items()):
            if sink.is_due(now):
                by_loop.setdefault(sink.loop, []).append((request_id, sink, sink.pop_due(now)))
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
