"""Simulates one backend: the limiter admits requests, replicas compute them, and a policy scales the replicas."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from math import ceil, inf
from random import Random
from typing import Protocol

from bench.simulation.outcome import Outcome
from bench.simulation.replica import Device, Job, Replica
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import Admit, Grant, Refusal, Release
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price
from serve_app.limiter.admission import Admission
from serve_app.limiter.pressure import Tuning
from serve_app.scaling.signals import LoadMeter, ReplicaLoad, Signals

BACKEND = "backend"
SDK_RETRIES = 2  # automatic retries of client libraries


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that a client sends. `at` is in seconds from the start, lengths are in tokens.

    `cached` tokens of the prompt are in a replica's cache and are not computed.
    """

    at: float
    account_id: str
    prompt: int
    output: int
    max_tokens: int = 1024
    cached: int = 0
    price: Price | None = None


class Policy(Protocol):
    """Chooses the number of replicas. Called every `Fleet.look_s`."""

    def wanted(self, signals: Signals) -> int:
        """Returns the desired number of replicas."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas' device, number, price and times."""

    device: Device = field(default_factory=Device)
    least: int = 1
    most: int = 8
    start_s: float = 90.0  # time from the decision to start a replica to its first request; it is also paid
    price_per_hour: float = 4.0  # of one replica
    report_s: float = 0.5  # time between two reports of a replica to the limiter
    look_s: float = 2.0  # time between two decisions of the policy, which uses the last reports
    began_at: float = 0.0  # Unix time of second 0, for schedules


@dataclass(slots=True, eq=False)
class _Machine:
    replica: Replica
    meter: LoadMeter
    paid_from: float
    load: ReplicaLoad | None = None


class Cluster:
    """Runs all events in the order of time. All accounts are known and have money."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        accounts: Iterable[str],
        *,
        seed: int = 0,
        replicas: int | None = None,
        contract: Contract | None = None,
        tuning: Tuning | None = None,
        retries: int = SDK_RETRIES,
    ) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.outcome = Outcome()
        self.rng = Random(seed)
        self._policy = policy
        self._retries = retries
        self._tuning = tuning or Tuning()
        contract = contract or Contract(rpm=1_000_000, tpm=50_000_000, concurrency=10_000)
        self._limiter = Admission(
            lambda: self.now, Random(seed), contract, recovery_s=0.0, wall=lambda: self.now, tuning=self._tuning
        )
        for account_id in accounts:
            snapshot = AccountSnapshot(account_id, "", True, "USD", 0, 10**18, 1, 0.0, asdict(contract))
            self._limiter.apply(snapshot)
            self._limiter.apply(KeySnapshot(f"id-{account_id}", account_id, "", account_id, "", True, 1, 0.0))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._numbers = count()
        self._machines: list[_Machine] = []
        self._starting: list[float] = []  # for each starting replica, the time of its decision, from which it is paid
        self._held: deque[Job] = deque()  # requests that were admitted while no replica was ready
        self._target = fleet.least if replicas is None else replicas
        for _ in range(self._target):
            self._add(0.0)

    def run(self, arrivals: Iterable[Arrival], until: float) -> Outcome:
        """Runs until `until` and returns the outcome, which also counts the requests that are unfinished then."""
        self._after(self.fleet.look_s, self._look)
        self._next_arrival(iter(arrivals))
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, happen = heapq.heappop(events)
            happen()
        self.now = until
        for machine in self._machines:
            self._pay(machine.paid_from)
        for since in self._starting:
            self._pay(since)
        self.outcome.seconds = until
        self.outcome.unfinished += len(self._held) + sum(
            one.replica.waiting + one.replica.running for one in self._machines
        )
        return self.outcome

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), happen))

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self.now + seconds, happen)

    def _next_arrival(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self._at(arrival.at, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._next_arrival(arrivals)
        self.outcome.requests += 1
        self._try(arrival, self._retries)

    def _try(self, arrival: Arrival, retries: int) -> None:
        number = next(self._numbers)
        request_id = f"r{number}"
        answer = self._limiter.admit(
            Admit(request_id, "gateway", arrival.account_id, "m", arrival.prompt, arrival.max_tokens, 1, 1, BACKEND)
        )
        if isinstance(answer, Refusal):
            self._refused(arrival, retries, answer.retry_after_s or 1.0)
            return
        assert isinstance(answer, Grant), answer
        output = max(1, min(arrival.output, answer.max_tokens))
        ended = partial(self._ended, arrival, retries)
        job = Job(
            request_id, arrival.account_id, 1.0, max(1, arrival.prompt - arrival.cached), output, number, self.now,
            self._tuning.deadline_s, lambda kind, now: ended(job, kind),
        )  # fmt: skip
        self._send(job)

    def _refused(self, arrival: Arrival, retries: int, wait_s: float) -> None:
        if retries == self._retries:
            self.outcome.refused += 1
        self.outcome.refusals.append(self.now)
        if retries:
            self._after(wait_s, lambda: self._try(arrival, retries - 1))
        else:
            self.outcome.given_up += 1

    def _send(self, job: Job) -> None:
        ready = [one for one in self._machines if not one.replica.draining]
        if not ready:
            self._held.append(job)
            self._at(job.arrived_at + job.deadline_s, lambda: self._expire(job))
            return
        machine = self.rng.choice(ready)  # takes the less loaded of two random replicas, as Serve does
        other = self.rng.choice(ready)
        if other.replica.running + other.replica.waiting < machine.replica.running + machine.replica.waiting:
            machine = other
        if machine.replica.add(job, self.now):
            self._plan(machine.replica)
        else:
            job.on_end("full", self.now)

    def _expire(self, job: Job) -> None:
        if job in self._held:
            self._held.remove(job)
            job.on_end("late", self.now)

    def _ended(self, arrival: Arrival, retries: int, job: Job, kind: str) -> None:
        done = kind == "done"
        tokens = (arrival.prompt, ceil(job.output)) if done else (0, 0)
        self._limiter.release(Release(job.request_id, *tokens, refused=not done))
        if done:
            self.outcome.served(arrival, job)
        elif kind == "late":
            self.outcome.late += 1
        else:
            self._after(0.0, lambda: self._refused(arrival, retries, 2.0))

    def _plan(self, replica: Replica) -> None:
        due, version = replica.next_event(), replica.version
        if due < inf and replica.planned != version:
            replica.planned = version
            self._at(due, partial(self._step, replica, version))

    def _step(self, replica: Replica, version: int) -> None:
        if replica.version == version:
            replica.planned = -1
            replica.run_until(self.now)
            self._plan(replica)

    def _add(self, paid_from: float) -> None:
        replica = Replica(f"replica-{next(self._numbers)}", self.fleet.device, self.now)
        machine = _Machine(replica, LoadMeter(self.fleet.device.slots), paid_from)
        self._machines.append(machine)
        self._after(self.fleet.report_s * self.rng.random(), lambda: self._report(machine))
        waiting, self._held = self._held, deque()
        for job in waiting:
            self._send(job)

    def _report(self, machine: _Machine) -> None:
        replica = machine.replica
        report = replica.report(BACKEND, self.now)
        heard = self._limiter.report(report)
        machine.load = machine.meter.take(report, heard.refused_tokens_per_s, self.now)
        if replica.draining and not replica.running and not replica.waiting:
            self._machines.remove(machine)
            self._pay(machine.paid_from)
            return
        self._after(self.fleet.report_s, lambda: self._report(machine))

    def _look(self) -> None:
        self._after(self.fleet.look_s, self._look)
        ready = [one for one in self._machines if not one.replica.draining]
        signals = Signals(
            now=self.fleet.began_at + self.now,
            replicas=tuple(one.load for one in ready),
            target=self._target,
            held=len(self._held),
            least=self.fleet.least,
            most=self.fleet.most,
        )
        self._change(max(self.fleet.least, min(self.fleet.most, self._policy.wanted(signals))), ready)
        self.outcome.replicas.append(len(ready))
        self.outcome.paid.append(len(self._machines) + len(self._starting))

    def _change(self, wanted: int, ready: list[_Machine]) -> None:
        if wanted != self._target:
            self.outcome.changes += 1
        for _ in range(wanted - self._target):
            since = self.now
            self._starting.append(since)
            self._after(self.fleet.start_s * self.rng.uniform(0.8, 1.2), lambda since=since: self._started(since))  # type: ignore[misc]
        surplus = self._target - wanted
        while surplus > 0 and self._starting:  # cancels starting replicas first, as Serve does
            self._pay(self._starting.pop())
            surplus -= 1
        for machine in ready[len(ready) - surplus :] if surplus > 0 else ():
            machine.replica.draining = True
        self._target = wanted

    def _started(self, since: float) -> None:
        if since in self._starting:  # otherwise the start was cancelled
            self._starting.remove(since)
            self._add(since)

    def _pay(self, since: float) -> None:
        self.outcome.cost += (self.now - since) / 3600.0 * self.fleet.price_per_hour
