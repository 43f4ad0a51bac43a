"""Simulates one backend: clock, events, limiter shards, replicas, and the outcome of each request."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from math import ceil, inf
from random import Random

from bench.pressure.record import Record
from bench.simulation.replica import Device, Job, Replica
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import Admit, Grant, Refusal, Release
from serve_app.contracts.limits import Contract
from serve_app.limiter.admission import Admission
from serve_app.limiter.pressure import Tuning

BACKEND = "model"
REPORT_S = 0.5


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings of an autoscaler by requests per replica, as in Ray Serve, and the start time of a replica."""

    least: int = 1
    most: int = 1
    requests: float = 24.0  # target per replica, including waiting ones
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0
    start_s: float = 90.0


class World:
    """Runs all events in the order of time. All accounts are known and have money."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 1,
        device: Device | None = None,
        tuning: Tuning | None = None,
        contract: Contract | None = None,
        shards: int = 1,
        scaling: Scaling | None = None,
        window_s: float = 60.0,
    ) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.device = device or Device()
        self.tuning = tuning or Tuning()
        self.contract = contract or Contract(rpm=6_000, tpm=1_000_000, concurrency=256)
        self.scaling = scaling
        self.record = Record(window_s)
        self.replicas: list[Replica] = []
        self.contracts: dict[str, Contract] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._numbers = count()
        self._starting = 0
        self._wanted_since: tuple[int, float] = (replicas, 0.0)
        self.shards = [self.new_shard(shards) for _ in range(shards)]
        for _ in range(replicas):
            self.add_replica()
        if scaling is not None:
            self.at(10.0, self._autoscale)

    def new_shard(self, shards: int) -> Admission:
        """Creates one of `shards` limiters. It has no accounts or requests yet."""
        rng = Random(self.rng.random())
        admission = Admission(lambda: self.now, rng, self.contract, recovery_s=0.0, tuning=self.tuning)
        admission.shares.shards = shards
        return admission

    @property
    def multiplier(self) -> float:
        """The share of the default contract's token rate that is allowed now, from `Tuning.floor` to 1."""
        return self.shards[0].shares.rate(BACKEND, self.contract, self.now) / (self.contract.tpm / 60.0)

    def restart_shard(self, index: int) -> None:
        """Replaces a limiter with one that knows the accounts, but not the open requests."""
        self.shards[index] = self.new_shard(len(self.shards))
        for account_id, contract in self.contracts.items():
            if self._shard_index(account_id) == index:
                self._introduce(account_id, contract)

    def add_account(self, account_id: str, contract: Contract | None = None) -> None:
        """Adds an account to its limiter."""
        self.contracts[account_id] = contract or self.contract
        self._introduce(account_id, self.contracts[account_id])

    def at(self, time: float, run: Callable[[], None]) -> None:
        """Calls `run` at `time`."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), run))

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Calls `run` after `seconds`."""
        self.at(self.now + seconds, run)

    def run(self, until: float) -> None:
        """Runs all events up to `until`."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, run = heapq.heappop(events)
            run()
        self.now = until

    def submit(
        self, account_id: str, prompt: int, output: int, on_end: Callable[[str], None], max_tokens: int = 1024
    ) -> Refusal | None:
        """Sends a request. Returns the refusal, if any; otherwise `on_end` gets "done", "late", "lost" or "full"."""
        number = next(self._numbers)
        request_id = f"r{number}"
        admission = self.shards[self._shard_index(account_id)]
        answer = admission.admit(
            Admit(request_id, "gateway", f"key-{account_id}", "m", prompt, max_tokens, 1, 1, backend=BACKEND)
        )
        if isinstance(answer, Refusal):
            self.record.refused(self.now, account_id, answer, self.contracts[account_id])
            return answer
        assert isinstance(answer, Grant), answer
        weight = self.contracts[account_id].weight / self.contract.weight
        ended = partial(self._ended, admission, account_id, on_end)
        job = Job(
            request_id, account_id, weight, prompt, min(output, answer.max_tokens), number, self.now,
            self.tuning.deadline_s, lambda kind, now: ended(job, kind),
        )  # fmt: skip
        replica = self._route()
        if replica is None or not replica.add(job, self.now):
            admission.release(Release(request_id, 0, 0, refused=True))
            self.record.ended(self.now, job, "full")
            self.after(0.0, lambda: on_end("full"))
        else:
            self._plan(replica)
        return None

    def add_replica(self) -> Replica:
        """Adds a replica that is ready immediately."""
        replica = Replica(f"replica-{next(self._numbers)}", self.device, self.now)
        self.replicas.append(replica)
        self.at(self.now + REPORT_S * self.rng.random(), lambda: self._report(replica))
        return replica

    def lose_replica(self, back_after_s: float = inf) -> None:
        """Kills the first replica with all its requests. Another replica starts after `back_after_s`."""
        replica = self.replicas.pop(0)
        replica.lose_all(self.now)
        if back_after_s < inf:
            self._starting += 1
            self.after(back_after_s, self._started)

    def _shard_index(self, account_id: str) -> int:
        return sum(account_id.encode()) % len(self.shards)

    def _introduce(self, account_id: str, contract: Contract) -> None:
        admission = self.shards[self._shard_index(account_id)]
        admission.apply(AccountSnapshot(account_id, "", True, "EUR", 0, 10**18, 1, 0.0, asdict(contract)))
        admission.apply(KeySnapshot(f"id-{account_id}", account_id, "", f"key-{account_id}", "", True, 1, 0.0))

    def _route(self) -> Replica | None:
        """The less loaded of two random replicas, as in Ray Serve."""
        ready = [replica for replica in self.replicas if not replica.draining]
        if len(ready) > 2:
            ready = self.rng.sample(ready, 2)
        return min(ready, key=lambda one: one.running + one.waiting, default=None)

    def _plan(self, replica: Replica) -> None:
        due, version = replica.next_event(), replica.version

        def run() -> None:
            if replica.version == version:
                replica.planned = -1
                replica.run_until(self.now)
                self._plan(replica)

        if due < inf and replica.planned != version:
            # The next event of a version is scheduled once. A new request that only waits does not change the version.
            replica.planned = version
            self.at(due, run)

    def _ended(self, admission: Admission, account_id: str, on_end: Callable[[str], None], job: Job, kind: str) -> None:
        done = kind == "done"
        used = (job.prompt, ceil(job.output)) if done else (0, 0)
        admission.release(Release(job.request_id, *used, refused=not done))
        self.record.ended(self.now, job, kind)
        self.after(0.0, lambda: on_end(kind))

    def _report(self, replica: Replica) -> None:
        if replica not in self.replicas:
            return
        report = replica.report(BACKEND, self.now)
        for admission in self.shards:
            admission.report(report)
        pressure = self.shards[0].shares.backends[BACKEND].controller.pressure
        self.record.saw(self.now, self.multiplier, pressure, len(self.replicas))
        if replica.draining and not replica.running and not replica.waiting:
            self.replicas.remove(replica)
            return
        self.after(REPORT_S, lambda: self._report(replica))

    def _autoscale(self) -> None:
        scaling = self.scaling
        assert scaling is not None
        self.after(10.0, self._autoscale)
        ready = [replica for replica in self.replicas if not replica.draining]
        load = sum(replica.running + replica.waiting for replica in ready)
        wanted = min(scaling.most, max(scaling.least, ceil(load / scaling.requests)))
        have = len(ready) + self._starting
        direction = (wanted > have) - (wanted < have)
        if direction != self._wanted_since[0]:
            self._wanted_since = direction, self.now
        for_s = self.now - self._wanted_since[1]
        if direction > 0 and for_s >= scaling.up_delay_s:
            self._starting += wanted - have
            for _ in range(wanted - have):
                self.after(scaling.start_s, self._started)
        elif direction < 0 and for_s >= scaling.down_delay_s and len(ready) > 1:
            ready[-1].draining = True

    def _started(self) -> None:
        self._starting -= 1
        self.add_replica()
