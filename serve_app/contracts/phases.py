"""Measures the phases of a reply as its events arrive, in the gateway and in the replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.contracts.generation import Delta, Finished, ReplyParts, Started


class Phases:
    """Arrival times of a reply's events, in seconds of `clock`. They do not depend on when an event is read.

    `gap` receives the seconds between two pieces of the reply.
    """

    def __init__(self, gap: Callable[[float], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap = gap
        self._clock = clock
        self.called_at: float | None = None
        self.started_at: float | None = None  # the request left the replica's queue
        self.first_at: float | None = None  # the first token
        self.last_at: float | None = None  # the latest token so far
        self.ended_at: float | None = None
        self.failed = False  # the replica failed or had no capacity
        self._first_tokens = 0
        self._tokens = 0

    def called(self) -> None:
        """Records a call to a replica. The gateway calls again for a larger hold or on the fallback."""
        self.called_at = self.called_at or self._clock()
        self.started_at = None

    def anew(self) -> Phases:
        """Ends this run and returns the phases of the request's next run."""
        begun = Phases(self._gap, self._clock)
        self.end()
        return begun

    def end(self) -> None:
        """Ends the run: no more events arrive, whether or not the reply was complete."""
        if self.called_at is not None:
            self.ended_at = self.ended_at or self._clock()
        self._gap = None  # it may refer to the request, which would leave a reference cycle

    def take(self, event: object) -> None:
        """Records the arrival of an event."""
        now = self._clock()
        if isinstance(event, Delta | ReplyParts):
            if event.completion_tokens <= self._tokens:
                return
            if self.first_at is None or self.last_at is None:
                self.first_at, self._first_tokens = now, event.completion_tokens
            elif self._gap is not None:
                self._gap(now - self.last_at)
            self.last_at, self._tokens = now, event.completion_tokens
        elif isinstance(event, Started):
            self.started_at = self.started_at or now
        elif isinstance(event, Finished):
            self.ended_at = now

    @property
    def queue_s(self) -> float | None:
        return _between(self.called_at, self.started_at)

    @property
    def prefill_s(self) -> float | None:
        return _between(self.started_at, self.first_at)

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_at, self.ended_at)

    @property
    def per_token_s(self) -> float | None:
        """Mean time between tokens; None for a reply that came in one piece."""
        seconds, tokens = _between(self.first_at, self.last_at), self._tokens - self._first_tokens
        return None if seconds is None or tokens < 1 else seconds / tokens


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
