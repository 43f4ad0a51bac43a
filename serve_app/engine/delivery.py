"""Hands events from the engine's thread to whoever waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serve_app.engine.request import Event

logger = logging.getLogger(__name__)


class LoopSink:
    """Events of one request on their way to a coroutine of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.events: asyncio.Queue[Event] = asyncio.Queue()


Sink = Callable[[Event], None] | LoopSink


class Outbox:
    """Collects a step's events and delivers them. Belongs to the engine's thread.

    `on_lost(request_id)` is called for a request whose receiver is gone or has raised.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._pending: list[tuple[str, Sink, Event]] = []

    def put(self, request_id: str, sink: Sink, event: Event) -> None:
        """Keep an event for the next delivery."""
        self._pending.append((request_id, sink, event))

    def deliver(self) -> None:
        """Deliver in order; a loop is woken once for all its events, since each wake-up costs a system call."""
        pending, self._pending = self._pending, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[str, LoopSink, Event]]] = {}
        for request_id, sink, event in pending:
            if isinstance(sink, LoopSink):
                by_loop.setdefault(sink.loop, []).append((request_id, sink, event))
                continue
            try:
                sink(event)
            except Exception:
                logger.exception("The receiver of request %s failed; the request is aborted.", request_id)
                self._on_lost(request_id)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed
                for request_id, _, _ in batch:
                    self._on_lost(request_id)


def _put_all(batch: list[tuple[str, LoopSink, Event]]) -> None:
    for _, sink, event in batch:
        sink.events.put_nowait(event)
