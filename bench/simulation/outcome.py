"""Outcome of a simulation: the results of its requests, and the cost of the replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from bench.simulation.replica import Job

if TYPE_CHECKING:
    from bench.simulation.cluster import Arrival


@dataclass(slots=True)
class Outcome:
    """Counts of requests, unless noted otherwise. A finished request counts as `done`, `given_up` or `late`."""

    requests: int = 0
    done: int = 0
    refused: int = 0  # requests that were refused at least once
    given_up: int = 0  # requests that were refused at each attempt
    late: int = 0  # requests that were admitted but not begun by the deadline
    unfinished: int = 0  # requests that wait or run when the simulation ends
    refusals: list[float] = field(default_factory=list)  # time of each refused attempt
    queued_s: list[float] = field(default_factory=list)  # per completed request: from admission to a batch slot
    first_s: list[float] = field(default_factory=list)  # per completed request: from first attempt to first token
    tokens: tuple[int, int] = (0, 0)  # prompt and output tokens of completed requests
    revenue: int = 0  # nano-units
    changes: int = 0  # number of changes of the target number of replicas
    cost: float = 0.0  # cost of all replicas, each from the decision to start it to the end of its last reply
    seconds: float = 0.0
    replicas: list[int] = field(default_factory=list)  # number of replicas that accept requests, at each decision
    paid: list[int] = field(default_factory=list)  # `replicas` plus those that start or drain

    def served(self, arrival: Arrival, job: Job) -> None:
        """Counts a completed request."""
        self.done += 1
        self.queued_s.append(job.started_at - job.arrived_at)
        self.first_s.append(job.first_at - arrival.at)
        self.tokens = self.tokens[0] + arrival.prompt, self.tokens[1] + job.output
        if arrival.price is not None:
            self.revenue += arrival.price.cost(arrival.prompt, arrival.cached, job.output)

    @property
    def refused_share(self) -> float:
        """Returns the share of the requests that were refused at least once or were late, 0 to 1."""
        return (self.refused + self.late) / max(1, self.requests)

    @property
    def queued_p95_s(self) -> float:
        return percentile(self.queued_s, 0.95)

    @property
    def first_p95_s(self) -> float:
        return percentile(self.first_s, 0.95)


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile; 0 without values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0
