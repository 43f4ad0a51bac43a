"""A waiting queue that shares the engine among tenants: the Virtual Token Counter of arXiv 2401.00588.

Each tenant has a counter of the service it got: tokens computed of its prompts plus tokens of output, weighted, and
divided by the tenant's own weight (`GenerationRequest.weight`): one of weight 2 gets twice as much. The tenant with
the lowest counter is next. Who comes back after a pause is lifted to the lowest counter of those who wait,
so nobody saves up service; who waits all the time gets within 2·max(w_p·L, w_o·M) of what any other such tenant gets,
over any stretch of time, where L is the longest prompt and M the most tokens that run at once. Nothing idles for it:
whenever anybody waits, somebody is next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serve_app.engine.scheduling.sequence import Sequence
from serve_app.engine.scheduling.waiting import FifoQueue


@dataclass(slots=True)
class _Service:
    """What a tenant got."""

    counter: float = 0.0  # weighted tokens
    last_admission: int = -1


class FairQueue:
    """First come, first served within a tenant; the least served tenant first. Keyed by `sequence.request.tenant`.

    `prompt_weight` and `output_weight` are what one token counts. Service is remembered of `remembered` tenants, those
    charged last; a forgotten one is lifted like a new one. `peek` and `pop` are O(waiting tenants).
    """

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0, remembered: int = 10_000) -> None:
        self.prompt_weight = prompt_weight
        self.output_weight = output_weight
        self._remembered = remembered
        self._queues: dict[str, FifoQueue] = {}  # none of them empty
        self._services: OrderedDict[str, _Service] = OrderedDict()  # by last charge or return
        self._last_to_leave = ""
        self._admissions = 0

    def restore(self, sequence: Sequence) -> None:
        """Put back a sequence that was popped, before its tenant's later ones. It was served: nothing is lifted."""
        self._queues.setdefault(sequence.request.tenant, FifoQueue()).restore(sequence)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence behind its tenant's others."""
        tenant = sequence.request.tenant
        if tenant not in self._queues:
            # With nobody waiting, the one who left last stands for those who run.
            waiting = self._queues or (self._last_to_leave,)
            floor = min(self._service(other).counter for other in waiting)
            service = self._service(tenant)
            service.counter = max(service.counter, floor)
            self._queues[tenant] = FifoQueue()
            self._remember(tenant)
        self._queues[tenant].push(sequence)

    def peek(self) -> Sequence | None:
        """The oldest sequence of the tenant served least, None when empty."""
        heads = (head for queue in self._queues.values() if (head := queue.peek()) is not None)
        return min(heads, key=self._turn, default=None)

    def pop(self) -> Sequence:
        """Remove and return what `peek` shows; IndexError when empty. The caller charges what it computes."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty queue")
        self._service(sequence.request.tenant).last_admission = self._admissions
        self._admissions += 1
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence; KeyError if it is not here."""
        tenant = sequence.request.tenant
        self._queues[tenant].remove(sequence)
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last_to_leave = tenant

    def charge(self, sequence: Sequence, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count service against the sequence's tenant, whether it has others waiting or not."""
        tenant = sequence.request.tenant
        cost = self.prompt_weight * prompt_tokens + self.output_weight * output_tokens
        self._service(tenant).counter += cost / sequence.request.weight
        self._remember(tenant)

    def has_share(self, tenant: str, places: int) -> bool:
        """Whether `tenant` waits with less than its even share of `places` among those who wait, itself included."""
        own = self._queues.get(tenant)
        return (len(own) if own else 0) < places // (len(self._queues) + (own is None))

    def most_served(self, claimant: str, tenants: Iterable[str]) -> str | None:
        """Of `tenants` the one with the highest counter; None where `claimant`'s is higher still."""
        most = max(tenants, key=lambda tenant: self._service(tenant).counter, default=None)
        if most is None or self._service(most).counter < self._service(claimant).counter:
            return None
        return most

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def _turn(self, head: Sequence) -> tuple[float, int, int]:
        # Among equals the one whose last turn is longest ago: a tenant just lifted goes before those it was lifted to.
        service = self._service(head.request.tenant)
        return service.counter, service.last_admission, head.arrival

    def _service(self, tenant: str) -> _Service:
        return self._services.setdefault(tenant, _Service())

    def _remember(self, tenant: str) -> None:
        self._services.move_to_end(tenant)
        while len(self._services) > self._remembered:
            self._services.popitem(last=False)
