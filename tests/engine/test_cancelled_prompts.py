"""Long prompts whose client hangs up before their first token hardly delay other accounts, on a simulated clock."""

from __future__ import annotations

import random

from serve_app.engine.scheduling.blocks import BlockAllocator
from serve_app.engine.scheduling.pacing import PrefillPacer
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import Chunk, StepPlan, TokenSequence
from tests.engine.fakes import request

LONG = 20_000  # tokens
HANG_UP_S = 0.3
OUTPUT = 2


def seconds_of(plan: StepPlan) -> float:
    """A small model on two cores: 16 tokens of a prompt cost little more than one."""
    return 0.010 + 0.0004 * min(plan.num_tokens, 16) + 0.0011 * max(0, plan.num_tokens - 16)


class Run:
    """An engine's steps. One account sends long prompts and hangs up; four others send short ones, ten a second."""

    def __init__(self, hang_ups: int) -> None:
        self.pacer = PrefillPacer(16, 512)
        self.scheduler = Scheduler(
            BlockAllocator(10_000, 16),
            max_running=64,
            max_waiting=64,
            prefill_chunk=512,
            busy_chunk=self.pacer.chunk,
            long_chunk=self.pacer.idle_chunk,
            prefix_reuse=False,
        )
        self.now, self.arrivals = 0.0, 0
        self.waits: list[float] = []
        self.long: list[TokenSequence] = []
        self.hang_ups = hang_ups
        rng = random.Random(1)
        self.due = [(number + rng.random() / 2) / 10 for number in range(300)]

    def waits_s(self) -> list[float]:
        """Returns the times from each short prompt to its first token, sorted."""
        while self.due or self.scheduler.running:
            self.arrive()
            plan = self.scheduler.schedule()
            if not plan.chunks:
                self.now = self.due[0]
                continue
            seconds = seconds_of(plan)
            self.now += seconds
            rows = sum(chunk.sequence.num_output > 0 for chunk in plan.chunks)
            self.pacer.observe(rows, plan.num_tokens - rows, seconds)
            self.hang_up()
            for chunk in plan.chunks:
                if chunk.sequence in self.scheduler.running:
                    self.commit(chunk)
        return sorted(self.waits)

    def add(self, tenant: str, prompt: int, output: int, at: float) -> TokenSequence:
        self.arrivals += 1
        sequence = TokenSequence(request(str(self.arrivals), [7] * prompt, tenant=tenant), self.arrivals, at, output)
        self.scheduler.add(sequence)
        return sequence

    def arrive(self) -> None:
        while self.due and self.due[0] <= self.now:
            self.add(f"short-{self.arrivals % 4}", 40, OUTPUT, self.due.pop(0))
        while self.due and len(self.long) < self.hang_ups:
            self.long.append(self.add("long", LONG, 64, self.now))

    def hang_up(self) -> None:
        for sequence in [one for one in self.long if self.now >= one.arrival_time + HANG_UP_S]:
            self.long.remove(sequence)
            self.scheduler.finish(sequence)

    def commit(self, chunk: Chunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        if samples:
            if not sequence.num_output:
                self.waits.append(self.now - sequence.arrival_time)
            sequence.tokens.append(7)
        self.scheduler.computed(chunk, int(samples))
        if samples and sequence.num_output == OUTPUT:
            self.scheduler.finish(sequence)


def test_cancelled_prompts_lengthen_the_wait_of_other_accounts_by_half_at_most() -> None:
    calm, beside = Run(0).waits_s(), Run(8).waits_s()
    assert len(calm) == len(beside) == 300
    assert beside[-3] <= 1.5 * calm[-3]
