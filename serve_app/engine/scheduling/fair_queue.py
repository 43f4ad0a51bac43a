"""Fairness among tenants: the order of waiting requests and the division of a step's work.

The queue implements the Virtual Token Counter of arXiv 2401.00588. Each tenant has a counter of the service that it has
received: the costs of its computed prompt tokens and of its output tokens, divided by the tenant's weight
(`GenerationRequest.weight`; a tenant of weight 2 receives twice as much). The tenant with the lowest counter is next.

If a tenant returns after a pause, its counter is raised to the lowest counter among the waiting tenants, so it has no
advantage from the pause. Tenants that wait continuously receive service within 2·max(w_p·L, w_o·M) of each other over
any period. Here, w_p and w_o are the costs of a prompt token and of an output token, L is the longest prompt, and M is
the maximum number of tokens that run at once. The queue never leaves a slot idle while a request waits.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from serve_app.engine.errors import QueueFull
from serve_app.engine.request import GenerationRequest

_OVERFLOW = 2  # maximum queue length as a multiple of `max_waiting`, including requests within their tenants' shares


class Queued(Protocol):
    """An entry of the queue: a request and its unique position in the order of arrival."""

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def arrival(self) -> int: ...


Entry = TypeVar("Entry", bound=Queued)


@dataclass(slots=True)
class _Service:
    """The service that one tenant has received."""

    counter: float = 0.0  # cost of the served tokens, divided by the tenant's weight
    last_admission: int = -1


class FairQueue(Generic[Entry]):
    """Least served tenant first; first come, first served within a tenant (`entry.request.tenant`).

    `prompt_weight` and `output_weight` are the costs of one token. The queue remembers the service of the `remembered`
    most recently charged tenants. A forgotten tenant counts as a new one. `peek` and `pop` are O(waiting tenants).
    """

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0, remembered: int = 10_000) -> None:
        self.prompt_weight = prompt_weight
        self.output_weight = output_weight
        self._remembered = remembered
        self._queues: dict[str, list[Entry]] = {}  # by tenant, each ordered by arrival and never empty
        self._services: OrderedDict[str, _Service] = OrderedDict()  # by tenant, ordered by last charge or return
        self._last_to_leave = ""
        self._admissions = 0

    def push(self, entry: Entry) -> None:
        """Add a new entry behind its tenant's other entries."""
        tenant = entry.request.tenant
        if tenant not in self._queues:
            # If no tenant waits, the counter of the tenant that left the queue last is used instead.
            waiting = self._queues or (self._last_to_leave,)
            floor = min(self._service(other).counter for other in waiting)
            service = self._service(tenant)
            service.counter = max(service.counter, floor)
            self._remember(tenant)
        self.restore(entry)

    def restore(self, entry: Entry) -> None:
        """Put back a popped entry, ahead of its tenant's later entries. Does not raise the tenant's counter."""
        bisect.insort(self._queues.setdefault(entry.request.tenant, []), entry, key=_arrival)

    def peek(self, fits: Callable[[Entry], bool] = lambda entry: True) -> Entry | None:
        """The oldest entry of the least served tenant whose oldest entry `fits`; None if no oldest entry fits."""
        heads = (queue[0] for queue in self._queues.values() if fits(queue[0]))
        return min(heads, key=self._turn, default=None)

    def pop(self) -> Entry:
        """Remove and return the entry that `peek` returns; IndexError if there is none. Counts no service."""
        entry = self.peek()
        if entry is None:
            raise IndexError("pop from an empty queue")
        self.take(entry)
        return entry

    def take(self, entry: Entry) -> None:
        """Remove an entry whose turn has come; KeyError if it is not in the queue. Counts no service."""
        self._service(entry.request.tenant).last_admission = self._admissions
        self._admissions += 1
        self.withdraw(entry)

    def withdraw(self, entry: Entry) -> None:
        """Remove an entry; KeyError if it is not in the queue."""
        tenant = entry.request.tenant
        queue = self._queues[tenant]
        index = bisect.bisect_left(queue, entry.arrival, key=_arrival)
        if index == len(queue) or queue[index] is not entry:
            raise KeyError(entry.request.request_id)
        del queue[index]
        if not queue:
            del self._queues[tenant]
            self._last_to_leave = tenant

    def count_served(self, entry: Entry, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count service for the entry's tenant, even if the tenant has no entry in the queue."""
        tenant = entry.request.tenant
        cost = self.prompt_weight * prompt_tokens + self.output_weight * output_tokens
        self._service(tenant).counter += cost / entry.request.weight
        self._remember(tenant)

    def require_place(self, tenant: str, free_slots: int, max_waiting: int) -> None:
        """Check that one more request of `tenant` may wait; `free_slots` is the number of slots that are free now.

        Raises:
            QueueFull: beyond the free slots, `max_waiting` requests wait and the tenant already has its share of the
                queue, or `_OVERFLOW` times `max_waiting` requests wait.
        """
        excess = len(self) - free_slots - max_waiting
        if excess >= 0 and (excess >= (_OVERFLOW - 1) * max_waiting or not self._has_share(tenant, max_waiting)):
            raise QueueFull(len(self))

    def most_served(self, claimant: str, tenants: Iterable[str]) -> str | None:
        """The tenant of `tenants` with the highest counter; None if the `claimant`'s counter is higher."""
        served = max(tenants, key=lambda tenant: self._service(tenant).counter, default=None)
        if served is None or self._service(served).counter < self._service(claimant).counter:
            return None
        return served

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Entry]:
        return (entry for queue in self._queues.values() for entry in queue)

    def _has_share(self, tenant: str, places: int) -> bool:
        """Whether `tenant` has fewer entries than its share, if it and the waiting tenants divide `places` evenly."""
        own = self._queues.get(tenant)
        return (len(own) if own else 0) < places // (len(self._queues) + (own is None))

    def _turn(self, head: Entry) -> tuple[float, int, int]:
        # Ties go to the tenant whose last turn is oldest. So a returning tenant, whose counter was raised to that of
        # another tenant, precedes that other tenant.
        service = self._service(head.request.tenant)
        return service.counter, service.last_admission, head.arrival

    def _service(self, tenant: str) -> _Service:
        return self._services.setdefault(tenant, _Service())

    def _remember(self, tenant: str) -> None:
        self._services.move_to_end(tenant)
        while len(self._services) > self._remembered:
            self._services.popitem(last=False)


def _arrival(entry: Queued) -> int:
    return entry.arrival


def share_evenly(needs: Sequence[int], budget: int) -> list[int]:
    """Max-min fair shares: no share exceeds its need, and all shares below their needs are equal, apart from rounding.

    Exception: if there is any budget, and the first need is not 0, its share is at least 1, so its owner never starves.
    """
    shares = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda i: needs[i])
    for done, index in enumerate(order):
        shares[index] = min(needs[index], budget // (len(needs) - done))
        budget -= shares[index]
    if needs and needs[0] and not shares[0] and any(shares):
        shares[shares.index(max(shares))] -= 1
        shares[0] = 1
    return shares


def share_prefill(remaining: Sequence[int], budget: int) -> list[int]:
    """Divide prefill tokens among one tenant's prompts; `remaining` lists the oldest first.

    The oldest prompt gets at least half, so it always advances. The rest goes to the prompts nearest to their first
    token, so a short question does not wait behind a long document. Any remainder goes to the oldest.
    """
    if not remaining:
        return []
    shares = [0] * len(remaining)
    shares[0] = min(remaining[0], budget if len(remaining) == 1 else -(-budget // 2))
    left = budget - shares[0]
    for index in sorted(range(1, len(remaining)), key=lambda i: remaining[i]):
        shares[index] = min(remaining[index], left)
        left -= shares[index]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares


def share_prefill_among_tenants(
    prompts: Sequence[tuple[str, int]], budget: int, streaming: Container[str] = ()
) -> list[int]:
    """Divide a step's prefill tokens among `prompts`, given as (tenant, remaining tokens), oldest first.

    Tenants share evenly, so one tenant's many prompts do not slow down another tenant's single prompt. Tenants that are
    not `streaming` see no output yet, so together they get at least two thirds if they need it. `share_prefill` divides
    each tenant's share.
    """
    members: dict[str, list[int]] = {}
    for index, (tenant, _) in enumerate(prompts):
        members.setdefault(tenant, []).append(index)
    needs = {tenant: sum(prompts[i][1] for i in indices) for tenant, indices in members.items()}
    silent = [tenant for tenant in needs if tenant not in streaming]
    others = [tenant for tenant in needs if tenant in streaming]
    rest = budget - sum(needs[tenant] for tenant in others)
    first = min(sum(needs[tenant] for tenant in silent), max(budget * 2 // 3, rest)) if others else budget
    shares = [0] * len(prompts)
    for tenants, part in ((silent, first), (others, budget - first)):
        for tenant, share in zip(tenants, share_evenly([needs[t] for t in tenants], part), strict=True):
            indices = members[tenant]
            for index, tokens in zip(indices, share_prefill([prompts[i][1] for i in indices], share), strict=True):
                shares[index] = tokens
    return shares


def limit_long_prompts(prompts: Sequence[tuple[str, int]], long: Collection[int], limit: int) -> list[tuple[str, int]]:
    """Limit each tenant's oldest `long` prompt: all of these prompts together get at most `limit` tokens.

    `long` contains indices into `prompts`, which is as in `share_prefill_among_tenants`. The needs of all other long
    prompts become 0. Short prompts keep their needs.
    """
    oldest = {prompts[index][0]: index for index in sorted(long, reverse=True)}
    parts = dict(
        zip(oldest.values(), share_evenly([min(limit, prompts[i][1]) for i in oldest.values()], limit), strict=True)
    )
    return [(tenant, parts.get(i, 0) if i in long else tokens) for i, (tenant, tokens) in enumerate(prompts)]


def without_long_prompts(prompts: Sequence[tuple[str, int]], long: Collection[int]) -> list[tuple[str, int]]:
    """Set the need of each prompt in `long` (indices) to 0 if another tenant has a short prompt."""
    short = {tenant for i, (tenant, _) in enumerate(prompts) if i not in long}
    return [(tenant, 0 if i in long and short - {tenant} else tokens) for i, (tenant, tokens) in enumerate(prompts)]
