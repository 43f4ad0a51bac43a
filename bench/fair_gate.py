"""Simulates, in steps and without a clock, an engine that computes prompts in chunks, with and without the fair gate.

Run with `python -m bench.fair_gate [--json PATH]`. The figures are the same on every machine.

The engine works like vLLM: each step computes at most `step_tokens` tokens. Running sequences come first, then waiting
ones while tokens and slots are left. A request that the gate releases after the output of step t reaches the engine at
step t + 1 + `delay`, because vLLM has already scheduled the steps in between.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.fair_gate import FairGate, Place
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.seen_prefixes import SeenPrefixes

RUNNING: Final = 256  # sequences at a time
BLOCK: Final = 16  # tokens of a block of the engine's prefix cache
LIGHT: Final = "light"
LIGHT_PROMPT: Final = 100
LIGHT_EVERY: Final = 7  # steps between two requests of the light account


@dataclass(frozen=True, slots=True)
class Load:
    """Equal accounts that always have requests waiting. Lengths are in tokens."""

    prompt: int
    cached: int  # length of the beginning that the prompt shares with an earlier one of the account
    accounts: int
    output: int
    step_tokens: int
    delay: int  # 1 if vLLM schedules a step once it has the last outputs, 2 if it schedules one step ahead


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prompt tokens computed per step, and the steps that each prompt of the light account waited."""

    rate: float
    waits: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Job:
    """A request and its progress in the engine."""

    request: GenerationRequest
    arrived: int  # number of the step in which it arrived
    output: int
    shared: int  # tokens of the prompt that it shares with the account's other prompts
    place: Place | None = None
    priority: int = 0
    cached: int = 0
    computed: int = 0
    produced: int = 0

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_token_ids)


class Engine:
    """Computes prompts in chunks. Its prefix cache has room for everything."""

    def __init__(self, step_tokens: int, slots: int, computed: dict[str, int]) -> None:
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.prompt_tokens = 0  # prompt tokens computed since the start
        self._step_tokens = step_tokens
        self._slots = slots
        self._computed = Counter(computed)  # tokens of the shared beginning that are cached, by tenant

    def add(self, sequence: Job) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda one: one.priority)  # stable

    def step(self) -> list[Job]:
        """Runs one step. Returns the sequences that got a token, and removes those that have all their tokens."""
        left = self._step_tokens
        advanced = []
        for sequence in self.running:
            if not left:
                break
            left -= self._advance(sequence, left)
            advanced.append(sequence)
        while self.waiting and left and len(self.running) < self._slots:
            sequence = self.waiting.pop(0)
            found = min(self._computed[sequence.tenant], sequence.shared, sequence.prompt - 1)
            sequence.cached = sequence.computed = found // BLOCK * BLOCK
            left -= self._advance(sequence, left)
            self.running.append(sequence)
            advanced.append(sequence)
        self.running = [one for one in self.running if one.produced < one.output]
        return [one for one in advanced if one.produced]

    def _advance(self, sequence: Job, left: int) -> int:
        """Computes a sequence's next token, or at most `left` tokens of its prompt. Returns the number of tokens."""
        if sequence.computed == sequence.prompt:
            sequence.produced += 1
            return 1
        tokens = min(sequence.prompt - sequence.computed, left)
        sequence.computed += tokens
        sequence.produced += sequence.computed == sequence.prompt
        self.prompt_tokens += tokens
        shared = min(sequence.computed, sequence.shared)
        self._computed[sequence.tenant] = max(self._computed[sequence.tenant], shared)
        return tokens


def fair_gate(step_tokens: int) -> FairGate:
    return FairGate(
        FairQueue(),
        SeenPrefixes(10**6),
        max_running=RUNNING,
        max_waiting=10**6,
        spare=RUNNING // 8,
        step_tokens=step_tokens,
    )


class Simulation:
    """One load on one engine; `gate` is None for an engine alone."""

    def __init__(self, load: Load, gate: Any, has_light: bool) -> None:
        self._load = load
        self._gate = gate
        self._has_light = has_light
        self._tenants = [f"heavy {number}" for number in range(load.accounts)]
        self._shared = {
            tenant: tuple(range(number, load.cached + number)) for number, tenant in enumerate(self._tenants)
        }
        slots = RUNNING if gate is None else RUNNING + RUNNING // 8
        self._engine = Engine(load.step_tokens, slots, dict.fromkeys(self._tenants, load.cached))
        self._sent: deque[tuple[int, Job]] = deque()  # on the way to the engine: step of arrival, request
        self._numbers = itertools.count()
        self._waiting: Counter[str] = Counter()  # requests that the engine has not begun, by tenant
        self._live: dict[str, Job] = {}
        self._waits: list[int] = []
        self._now = 0

    def run(self, steps: int) -> Outcome:
        self._remember_shared()
        before = 0
        for self._now in range(2 * steps):
            if self._now == steps:
                before = self._engine.prompt_tokens
            self._arrive()
            self._release()
            while self._sent and self._sent[0][0] <= self._now:
                self._engine.add(self._sent.popleft()[1])
            for sequence in self._engine.step():
                self._take(sequence)
        waiting = [self._now + 1 - one.arrived for one in self._live.values() if one.tenant == LIGHT]
        return Outcome((self._engine.prompt_tokens - before) / steps, (*self._waits, *waiting))

    def _remember_shared(self) -> None:
        """Tells the gate about an earlier prompt of each account, whose beginning the engine has cached."""
        for tenant in self._tenants:
            if self._gate is not None and self._load.cached:
                place = self._gate.add(self._request(tenant, 0), 0.0)
                self._gate.release()
                self._gate.started(place, 0)
                self._gate.leave(place)

    def _arrive(self) -> None:
        own = self._load.prompt - self._load.cached
        # number of waiting requests that keeps the engine busy until new ones reach it
        backlog = min(192, 16 + 6 * self._load.step_tokens // own)
        for tenant in self._tenants:
            while self._waiting[tenant] < backlog // len(self._tenants):
                request = self._request(tenant, own)
                self._add(request, self._load.output, self._load.cached)
        if self._has_light and self._now % LIGHT_EVERY == 0:
            self._add(self._request(LIGHT, LIGHT_PROMPT), 1, 0)

    def _request(self, tenant: str, own: int) -> GenerationRequest:
        number = next(self._numbers)
        begin = 10**6 + number * 10**5
        tokens = self._shared.get(tenant, ()) + tuple(range(begin, begin + own))
        return GenerationRequest(str(number), tokens, SamplingParams(max_tokens=1), tenant)

    def _add(self, request: GenerationRequest, output: int, shared: int) -> None:
        sequence = Job(request, self._now, output, shared)
        self._live[request.request_id] = sequence
        self._waiting[request.tenant] += 1
        if self._gate is None:
            self._sent.append((self._now + self._load.delay, sequence))
        else:
            sequence.place = self._gate.add(request, float(self._now))

    def _release(self) -> None:
        for place in [] if self._gate is None else self._gate.release():
            sequence = self._live[place.request.request_id]
            sequence.priority = getattr(place, "priority", 0)
            self._sent.append((self._now + self._load.delay, sequence))

    def _take(self, sequence: Job) -> None:
        if self._gate is not None:
            self._gate.produced(sequence.place, 1)
        if sequence.produced == 1:
            self._waiting[sequence.tenant] -= 1
            if self._gate is not None:
                self._gate.started(sequence.place, sequence.cached)
            if sequence.tenant == LIGHT:
                self._waits.append(self._now + 1 - sequence.arrived)
        if sequence.produced == sequence.output:
            if self._gate is not None:
                self._gate.leave(sequence.place)
            del self._live[sequence.request.request_id]


def simulate(
    load: Load,
    gate: Callable[[int], Any] | None = fair_gate,
    *,
    has_light: bool = False,
    steps: int = 100,
) -> Outcome:
    """Runs a load for `steps` steps, then measures as many steps. `gate` creates a gate from `step_tokens`."""
    return Simulation(load, None if gate is None else gate(load.step_tokens), has_light).run(steps)


def loads() -> list[Load]:
    lengths = [(1500, 0), (3000, 0), (16_000, 15_800), (16_000, 0)]
    return [
        Load(prompt, cached, accounts, output, step_tokens, delay)
        for step_tokens, delay, (prompt, cached), accounts, output in itertools.product(
            (2048, 8192), (1, 2), lengths, (1, 8), (1, 100)
        )
    ]


def figures(load: Load, gate: Callable[[int], Any] | None = fair_gate) -> dict[str, Any]:
    """Ratio of the throughput with the gate to that without; mean and longest wait of a light account in steps."""
    waits = simulate(load, gate, has_light=True).waits
    return {
        **asdict(load),
        "throughput": simulate(load, gate).rate / simulate(load, None).rate,
        "wait": sum(waits) / len(waits),
        "longest_wait": max(waits),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fair_gate", description=__doc__)
    parser.add_argument("--json", type=Path, help="File to write the figures to.")
    options = parser.parse_args(arguments)
    rows = []
    for load in loads():
        rows.append(row := figures(load))
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
