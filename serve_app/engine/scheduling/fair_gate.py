"""Admits requests to an engine that has its own scheduler: fairly among tenants and a few at a time.

Such an engine accepts every request at once, so requests wait here instead. The engine holds at most `max_running`
requests. Requests that have no output token yet normally hold at most two steps' worth of prompt tokens. Beyond that, a
request is admitted only if its tenant has no other request without output in the engine, and fewer than `_PROMPTS`
tenants have one. A new tenant's prompt therefore does not wait for every prompt that arrived before it. If one tenant
holds every slot, `spare` additional slots are available to tenants that have none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from serve_app.contracts.fairness import count_fairly
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.fair_queue import FairQueue

_PROMPTS = 8  # maximum number of tenants in prefill while more than two steps of prompt tokens wait
_ALWAYS_COUNTS = 4  # steps: a tenant's queued prompt tokens always count up to this many steps


@dataclass(eq=False, slots=True)
class Place:
    """A request in the gate; compared by identity."""

    request: GenerationRequest
    arrival: int
    arrived_at: float  # seconds on the engine's clock
    prompt_due: int  # prompt tokens that count as not computed
    is_waiting: bool = True

    @property
    def tenant(self) -> str:
        return self.request.tenant


class FairGate:
    """Not thread-safe. `step_tokens` is the maximum number of prompt tokens that the engine computes in one step."""

    def __init__(
        self, queue: FairQueue[Place], *, max_running: int, max_waiting: int, spare: int, step_tokens: int
    ) -> None:
        self._queue = queue
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._spare = spare
        self._step_tokens = step_tokens
        self._arrivals = itertools.count()
        self._running: Counter[str] = Counter()  # requests in the engine by tenant
        self._prefilling: set[Place] = set()  # the running requests that have no output token yet

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def add(self, request: GenerationRequest, now: float) -> Place:
        """Queue a request; `release` returns it when it may begin. Raises QueueFull, see `FairQueue.require_place`."""
        self._queue.require_place(request.tenant, max(0, self._max_running - self.running), self._max_waiting)
        place = Place(request, next(self._arrivals), now, len(request.prompt_token_ids))
        self._queue.push(place)
        return place

    def release(self) -> list[Place]:
        """Remove the requests that the engine may take now from the queue, and return them."""
        released = []
        while (head := self._queue.peek()) is not None and self._has_slot(head) and self._has_turn(head):
            self._queue.pop()
            head.is_waiting = False
            self._running[head.tenant] += 1
            self._prefilling.add(head)
            released.append(head)
        return released

    def started(self, place: Place, cached_tokens: int) -> None:
        """Record that the engine has computed the prompt, except for `cached_tokens` found in the cache."""
        self._prefilling.discard(place)
        self._queue.count_served(place, prompt_tokens=place.prompt_due - cached_tokens)
        place.prompt_due = 0

    def produced(self, place: Place, tokens: int) -> None:
        self._queue.count_served(place, output_tokens=tokens)

    def leave(self, place: Place) -> None:
        """Remove a request that has ended, or that was cancelled while it waited."""
        if place.is_waiting:
            self._queue.withdraw(place)
            return
        if place in self._prefilling:  # how much of the prompt the engine has computed is unknown
            self.started(place, 0)
        self._running[place.tenant] -= 1
        if not self._running[place.tenant]:
            del self._running[place.tenant]

    def oldest_wait_s(self, now: float) -> float:
        """Age of the oldest waiting request in seconds; 0 if none waits."""
        return max((now - place.arrived_at for place in self._queue), default=0.0)

    def queued_prefill_tokens(self) -> int:
        """See `Scheduler.queued_prefill_tokens`."""
        queued: Counter[str] = Counter()
        for place in (*self._queue, *self._prefilling):
            queued[place.tenant] += place.prompt_due
        return int(count_fairly(queued.values(), _ALWAYS_COUNTS * self._step_tokens))

    def _has_slot(self, head: Place) -> bool:
        extra = 0 if head.tenant in self._running else self._spare
        return self.running < self._max_running + extra

    def _has_turn(self, head: Place) -> bool:
        due = sum(place.prompt_due for place in self._prefilling)
        if not due or due + head.prompt_due <= 2 * self._step_tokens:
            return True
        tenants = {place.tenant for place in self._prefilling}
        return head.tenant not in tenants and len(tenants) < _PROMPTS
