"""Simulates a model replica: how long requests take on a device that computes prompts and decoding steps."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from serve_app.contracts.limiting import PressureReport
from serve_app.engine.errors import QueueFull
from serve_app.engine.scheduling.fair_queue import FairQueue


@dataclass(frozen=True, slots=True)
class Device:
    """Capacity of a replica. The defaults are typical of a mid-sized model on one GPU."""

    slots: int = 32  # sequences decoded at once
    max_waiting: int = 96
    kv_tokens: int = 120_000
    prefill_per_s: float = 12_000.0  # prompt tokens per second if nothing else runs
    step_s: float = 0.020  # time of a decoding step, without the time per sequence
    row_s: float = 0.0005  # time per sequence that a decoding step takes in addition
    prefill_share: float = 0.5  # share of the device's time for prompts while a batch runs


@dataclass(slots=True, eq=False)
class Job:
    """One admitted request. The engine's fair queue reads tenant and weight from `request`, which is the job itself."""

    request_id: str
    tenant: str
    weight: float
    prompt: int  # tokens
    output: int
    arrival: int  # number of the request, in order of arrival
    arrived_at: float
    deadline_s: float
    on_end: Callable[[str, float], None]  # called with "done", "full", "late" or "lost", and the time
    started_at: float = inf  # time at which it gets its place in the batch
    first_at: float = inf  # time of its first token: its prompt is then computed
    left: float = 0.0  # tokens of the prompt still to compute
    ends_at: float = 0.0  # value of the replica's `_progress` at which it ends
    charged: float = 0.0  # value of `_progress` up to which the fair queue has counted it

    @property
    def request(self) -> Job:
        return self


class Replica:
    """A fluid model: between events, sequences decode at one constant rate, and only the oldest prompt is computed.

    Requests wait in the engine's own fair queue. A starting sequence reserves room in the KV cache for its prompt and
    output, so nothing is preempted.
    """

    def __init__(self, name: str, device: Device, now: float) -> None:
        self.name = name
        self.device = device
        self.version = 0  # rises when the next event changes; the simulation ignores events of older versions
        self.planned = -1  # version for which the next event was scheduled
        self.draining = False
        self._queue: FairQueue[Any] = FairQueue()
        self._waiting: dict[Job, None] = {}  # oldest first
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[float, int, Job]] = []  # a heap by `ends_at`
        self._progress = 0.0  # tokens that a sequence would have decoded if it had run since the start
        self._now = now
        self._kv = 0
        self._tokens_done = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, job: Job, now: float) -> bool:
        """Queues a job, and starts it if possible. Returns False if the queue is full by the engine's rule."""
        try:
            self._queue.require_place(job.tenant, self.device.slots - self.running, self.device.max_waiting)
        except QueueFull:
            return False
        self._queue.push(cast(Any, job))
        self._waiting[job] = None
        self.run_until(now)
        return True

    def run_until(self, now: float) -> None:
        """Computes up to `now`, which must not be after the next event."""
        self._advance(now)
        changed = False
        while self._prefilling and self._prefilling[0].left <= 1e-6:
            job = self._prefilling.popleft()
            job.ends_at, job.charged, job.first_at = self._progress + job.output, self._progress, now
            heapq.heappush(self._decoding, (job.ends_at, job.arrival, job))
            changed = True
        while self._decoding and self._decoding[0][0] <= self._progress + 1e-6:
            job = heapq.heappop(self._decoding)[2]
            self._kv -= job.prompt + job.output
            self._charge(job)
            job.on_end("done", now)
            changed = True
        if (self._waiting and self._start(now)) or changed:
            self.version += 1

    def next_event(self) -> float:
        """Returns the time at which the next prompt or sequence finishes, if nothing else happens."""
        prefill, decode = self._rates()
        at = inf
        if self._prefilling:
            at = self._prefilling[0].left / prefill
        if self._decoding and decode > 0:
            at = min(at, max(0.0, self._decoding[0][0] - self._progress) / decode)
        return self._now + at

    def report(self, backend: str, now: float) -> PressureReport:
        """Reports as a real replica does. Also updates the fair queue and drops requests past their deadline."""
        self._advance(now)
        for job in [job for job in self._waiting if now - job.arrived_at > job.deadline_s]:
            self._queue.withdraw(cast(Any, job))
            del self._waiting[job]
            job.on_end("late", now)
        if self._waiting:
            for _, _, job in self._decoding:
                self._charge(job)
        oldest = next(iter(self._waiting), None)
        queued = sum(job.prompt for job in self._waiting) + sum(job.left for job in self._prefilling)
        return PressureReport(
            backend=backend,
            replica=self.name,
            queue_age_s=0.0 if oldest is None else now - oldest.arrived_at,
            kv_used=self._kv / self.device.kv_tokens,
            queued_prefill_tokens=int(queued),
            waiting=self.waiting,
            running=self.running,
            tokens_done=int(self._tokens_done),
        )

    def lose_all(self, now: float) -> None:
        """Ends all requests, as the death of the process does."""
        self.version += 1
        for job in [*self._waiting, *self._prefilling, *(job for _, _, job in self._decoding)]:
            job.on_end("lost", now)

    def _rates(self) -> tuple[float, float]:
        """Prompt tokens per second, and decoded tokens per second of each sequence."""
        share = 0.0
        if self._prefilling:
            share = self.device.prefill_share if self._decoding else 1.0
        step_s = self.device.step_s + self.device.row_s * len(self._decoding)
        return share * self.device.prefill_per_s, (1.0 - share) / step_s

    def _advance(self, now: float) -> None:
        dt = now - self._now
        if dt <= 0:
            return
        prefill, decode = self._rates()
        self._progress += decode * dt
        self._tokens_done += decode * dt * len(self._decoding)
        if self._prefilling:
            self._prefilling[0].left -= prefill * dt
        self._now = now

    def _start(self, now: float) -> bool:
        started = False
        while (head := cast("Job | None", self._queue.peek())) is not None and self.running < self.device.slots:
            if self._kv + head.prompt + head.output > self.device.kv_tokens:
                break
            self._queue.pop()
            del self._waiting[head]
            self._queue.count_served(cast(Any, head), prompt_tokens=head.prompt)
            self._kv += head.prompt + head.output
            self._tokens_done += head.prompt
            head.started_at, head.left = now, float(head.prompt)
            self._prefilling.append(head)
            started = True
        return started

    def _charge(self, job: Job) -> None:
        until = min(self._progress, job.ends_at)
        self._queue.count_served(cast(Any, job), output_tokens=cast(int, until - job.charged))
        job.charged = until
