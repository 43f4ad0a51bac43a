"""Admits requests to an engine that has its own scheduler: fairly among tenants and a few at a time.

Such an engine accepts every request immediately, so requests wait here instead. The engine holds at most `max_running`
requests. When these slots are taken, `spare` additional slots are available to tenants that have none.

The gate learns from the engine's outputs that there is room. The prompt that it then releases reaches the engine some
steps later. The gate therefore keeps `steps_ahead` steps' worth of prompt tokens in the engine, besides the prompt that
the engine is computing. Tokens that the engine has probably cached do not count. Beyond that, each of at most
`_MAX_PREFILLING` tenants may have one prompt in the engine, or several that fit in one step. A new tenant's prompt
therefore does not wait for every prompt that arrived before it. The engine takes released prompts in the order
of `Place.priority`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve_app.contracts.fairness import count_fairly
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.seen_prefixes import SeenPrefixes

_MAX_PREFILLING = 8  # maximum number of tenants with prompts in the engine once the prompts fill `steps_ahead` steps
# Bounds how many tokens of later prompts overtake a prompt: this number times the uncomputed prompt tokens that its
# tenant then has in the engine, this prompt included, divided by the tenant's weight.
_OVERTAKEN = 8


@dataclass(eq=False, slots=True)
class Place:
    """A request in the gate; compared by identity."""

    request: GenerationRequest
    arrival: int
    arrived_at: float  # seconds on the engine's clock
    prompt_due: int  # prompt tokens that are neither computed nor probably cached
    is_waiting: bool = True
    priority: int = 0  # set when the request is released; the engine computes prompts with lower numbers first

    @property
    def tenant(self) -> str:
        return self.request.tenant


class FairGate:
    """The queue in front of an engine that has its own scheduler. Not thread-safe.

    `seen` estimates how much of a prompt the engine has cached. The engine computes at most `step_tokens` prompt tokens
    in one step.
    """

    def __init__(
        self,
        queue: FairQueue[Place],
        seen: SeenPrefixes,
        *,
        max_running: int,
        max_waiting: int,
        spare: int,
        step_tokens: int,
        steps_ahead: int = 4,
    ) -> None:
        self._queue = queue
        self._seen = seen
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._spare = spare
        self._step_tokens = step_tokens
        self._tokens_ahead = steps_ahead * step_tokens
        self._arrivals = itertools.count()
        self._running: Counter[str] = Counter()  # requests in the engine by tenant
        self._prefilling: dict[Place, None] = {}  # the running requests that have no output token yet, oldest first
        self._released_tokens = 0  # prompt tokens released since the start

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def add(self, request: GenerationRequest, now: float) -> Place:
        """Queue a request; `release` returns it when it may begin. Raises QueueFull, see `FairQueue.require_place`."""
        self._queue.require_place(request.tenant, max(0, self._max_running - self.running), self._max_waiting)
        tokens = request.prompt_token_ids + request.said
        owner = (request.tenant or request.request_id, request.adapter)
        due = len(tokens) - self._seen.count_seen(owner, tokens)
        place = Place(request, next(self._arrivals), now, due)
        self._queue.push(place)
        return place

    def release(self) -> list[Place]:
        """Remove from the queue the requests that the engine may take now, and return them."""
        released = []
        while (head := self._queue.peek(self._admission_rule())) is not None:
            self._queue.take(head)
            head.is_waiting = False
            self._running[head.tenant] += 1
            self._prefilling[head] = None
            # Charged now, because otherwise the least served tenant would get all of the engine's room.
            self._queue.count_served(head, prompt_tokens=head.prompt_due)
            own = sum(place.prompt_due for place in self._prefilling if place.tenant == head.tenant)
            head.priority = self._released_tokens + int(_OVERTAKEN * own / head.request.weight)
            self._released_tokens += head.prompt_due
            released.append(head)
        return released

    def started(self, place: Place, cached_tokens: int) -> None:
        """Record that the engine has computed the prompt, except for `cached_tokens` found in the cache."""
        self._prefilling.pop(place, None)
        computed = len(place.request.prompt_token_ids) - cached_tokens
        self._queue.count_served(place, prompt_tokens=computed - place.prompt_due)
        place.prompt_due = 0

    def produced(self, place: Place, tokens: int) -> None:
        self._queue.count_served(place, output_tokens=tokens)

    def leave(self, place: Place) -> None:
        """Remove a request that has ended, or that was cancelled while it waited."""
        if place.is_waiting:
            self._queue.withdraw(place)
            return
        self._prefilling.pop(place, None)  # its charge stays, because how much was computed is unknown
        self._running[place.tenant] -= 1
        if not self._running[place.tenant]:
            del self._running[place.tenant]

    def oldest_wait_s(self, now: float) -> float:
        """Age of the oldest waiting request in seconds; 0 if none waits."""
        return max((now - place.arrived_at for place in self._queue), default=0.0)

    def queued_prefill_tokens(self) -> int:
        """See `Scheduler.queued_prefill_tokens`."""
        queued = self._prefill_tokens((*self._queue, *self._prefilling))
        return int(count_fairly(queued.values(), self._tokens_ahead))

    def _admission_rule(self) -> Callable[[Place], bool]:
        """A function that returns whether the engine may take a request now."""
        first = next(iter(self._prefilling), None)
        has_room = sum(place.prompt_due for place in self._prefilling if place is not first) < self._tokens_ahead
        due = self._prefill_tokens(self._prefilling)
        running = self.running

        def fits(head: Place) -> bool:
            if running >= self._max_running + (0 if head.tenant in self._running else self._spare):
                return False
            is_small = head.tenant not in due or due[head.tenant] + head.prompt_due <= self._step_tokens
            return has_room or (is_small and len(due) < _MAX_PREFILLING)

        return fits

    @staticmethod
    def _prefill_tokens(places: Iterable[Place]) -> Counter[str]:
        """Prompt tokens to compute, by tenant."""
        tokens: Counter[str] = Counter()
        for place in places:
            tokens[place.tenant] += place.prompt_due
        return tokens
