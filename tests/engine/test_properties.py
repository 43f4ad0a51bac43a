"""For any arrivals: no block is lost or has two owners, no request starves, and each reply is the one generated alone.

A state machine drives the engine's core over a model that sees nothing but its KV memory. After every step the blocks
are counted; at the end every reply is compared with the one that the model gives without cache, batch or guesses.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serve_app.contracts.generation import FinishReason
from serve_app.engine.errors import QueueFull
from serve_app.engine.output_stream import OutputStream
from serve_app.engine.request import GenerationRequest
from serve_app.engine.sampling import sampler
from serve_app.engine.sampling.sampler import SamplerState
from serve_app.engine.scheduling.sequence import SequenceStatus, StepPlan
from tests.engine.fakes import (
    EOS,
    POISON,
    VOCAB,
    Inbox,
    MemoryRunner,
    SteppedEngine,
    live,
    next_token_logits,
    request,
)

SIZE = 4
BOUNDS = (14, 30)


def said_alone(asked: GenerationRequest, most: int) -> list[int]:
    """The reply token by token, each computed from the whole context."""
    tokens = list(asked.prompt_token_ids)
    state = SamplerState(asked.sampling, asked.prompt_token_ids, frozenset({EOS}), VOCAB)
    while len(tokens) - len(asked.prompt_token_ids) < most:
        length_class = sum(len(tokens) > bound for bound in BOUNDS)
        logits = next_token_logits([token * 8 + length_class for token in tokens])
        (entry,) = sampler.sample(logits[None], [state], [()])
        if entry[0].token == EOS:
            break
        tokens.append(entry[0].token)
        state.advance(entry[0].token)
    return tokens[len(asked.prompt_token_ids) :]


class Adversary(OutputStream):
    """Guesses the right tokens, wrong ones, or right ones followed by wrong ones."""

    chance = random.Random(0)
    truth: dict[str, list[int]]

    def guess(self, limit: int) -> tuple[int, ...]:
        kind = self.chance.randrange(4)
        if kind == 0:
            return super().guess(limit)
        said = self.sequence.num_output
        truth = [*self.truth[self.sequence.request_id][said:], EOS, 97, EOS, 97, 98]
        tokens = truth[: self.chance.randint(0, limit)]
        if kind == 1 and tokens:
            for at in range(self.chance.randrange(len(tokens)), len(tokens)):
                tokens[at] = self.chance.choice((97, 98, 99, 100, EOS))
        return tuple(tokens)


class Life(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 16),
        running=st.integers(1, 4),
        waiting=st.integers(0, 6),
        chunk=st.integers(1, 12),
        busy=st.sampled_from([None, 1, 5]),
        rows=st.sampled_from([0, 3, 8]),
        reuse=st.sampled_from([True, True, False]),
        seed=st.integers(0, 1000),
    )
    def begin(
        self, blocks: int, running: int, waiting: int, chunk: int, busy: int | None, rows: int, reuse: bool, seed: int
    ) -> None:
        truth: dict[str, list[int]] = {}
        stream = type("Guesser", (Adversary,), {"chance": random.Random(seed), "truth": truth})
        self.engine = SteppedEngine(
            MemoryRunner(blocks, SIZE, BOUNDS),
            stream,
            max_running=running,
            max_waiting=waiting,
            prefill_chunk=chunk,
            prefill_chunk_busy=busy,
            speculation_rows=rows,
            prefix_reuse=reuse,
        )
        self.truth = truth
        self.requests: dict[str, tuple[GenerationRequest, Inbox]] = {}
        self.cancelled: set[str] = set()
        self.preempted_for_others = 0

    @rule(
        tenant=st.sampled_from("aaab"),
        prompt=st.lists(st.sampled_from([1, 1, 1, 1, 1, 2]), min_size=1, max_size=24),
        poison=st.sampled_from([None] * 14 + [0, 3]),
        output=st.integers(1, 14),
        sampling=st.sampled_from([{}, {}, {"temperature": 1.0, "seed": 5}, {"ignore_eos": True}]),
        weight=st.sampled_from([1.0, 1.0, 3.0]),
        patience=st.sampled_from([None, None, None, 3.0, 12.0]),
    )
    def arrive(
        self,
        tenant: str,
        prompt: list[int],
        poison: int | None,
        output: int,
        sampling: dict[str, object],
        weight: float,
        patience: float | None,
    ) -> None:
        core = self.engine.core
        if poison is not None:
            prompt = [*prompt[:poison], POISON, *prompt[poison:]]
        due = None if patience is None else self.engine.now + patience
        name = str(len(self.requests))
        asked = request(name, prompt, tenant, weight, due, max_tokens=output, **sampling)
        room = min(BOUNDS[-1], core.scheduler.allocator.num_blocks * SIZE) - len(prompt)
        self.truth[name] = said_alone(asked, min(output, room))
        waiting = core.scheduler.num_waiting
        try:
            inbox = self.engine.submit(asked)
        except QueueFull:
            assert waiting >= core.scheduler.max_waiting
            return
        assert core.scheduler.num_waiting <= core.scheduler.max_running + 2 * core.scheduler.max_waiting
        self.requests[name] = (asked, inbox)

    @precondition(lambda self: self.engine.core.streams)
    @rule(
        kind=st.sampled_from(["nothing"] * 3 + ["cancel", "cancel", "during", "during", "fail"]),
        which=st.integers(0, 9),
    )
    def disturb(self, kind: str, which: int) -> None:
        """A live request is cancelled, between two steps or during one; or a step fails."""
        core = self.engine.core
        name = list(core.by_id)[which % len(core.by_id)]
        if kind in ("cancel", "during"):
            self.cancelled.add(name)
        if kind == "cancel":
            self.engine.abort(name)
        elif kind == "during":
            plan = core.plan(self.engine.now)
            if plan.chunks:
                sampled = core.compute(plan, [core.streams[chunk.sequence] for chunk in plan.chunks])
                self.engine.abort(name)
                core.commit(plan, sampled, 0.0)
            self.engine.abort(name)
        elif kind == "fail":
            plan = core.plan(self.engine.now)
            self.cancelled.update(chunk.sequence.request_id for chunk in plan.chunks)
            core.fail(plan)
        self.engine.outbox.deliver()

    @precondition(lambda self: self.engine.core.streams)
    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        self.step(steps)

    @precondition(lambda self: self.engine.core.streams)
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.check_plan(self.engine.step())
            self.engine.now += 1.0
            self.blocks_are_whole()

    def check_plan(self, plan: StepPlan) -> None:
        scheduler = self.engine.core.scheduler
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        drafts = [len(chunk.draft) for chunk in plan.chunks]
        assert sum(drafts) <= max(0, scheduler.speculation_rows)
        assert sum(sequence.yielded for sequence in live(scheduler)) <= len(self.requests)

    @invariant()
    def blocks_are_whole(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.core.scheduler
        allocator = scheduler.allocator
        held = Counter(block for s in scheduler.running for block in s.block_table)
        assert all(allocator._references[block] == held[block] for block in range(allocator.num_blocks))
        states = [*held, *allocator._cached, *allocator._empty]
        assert sorted(states) == list(range(allocator.num_blocks)), "a block was lost or is two things at once"
        owners = Counter(block for s in scheduler.running for block in s.block_table[s.num_published :])
        assert not owners or max(owners.values()) == 1, "a block that is written to has two owners"
        assert len(scheduler.running) <= scheduler.max_running
        for sequence in scheduler.waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table
        for sequence in scheduler.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_computed < len(sequence.tokens)
            assert len(sequence.block_table) <= allocator.blocks_for(len(sequence.tokens))

    @invariant()
    def what_was_said_is_what_is_said_alone(self) -> None:
        for sequence in self.engine.core.streams if hasattr(self, "engine") else ():
            truth = self.truth[sequence.request_id]
            assert sequence.tokens[sequence.num_prompt :] == truth[: sequence.num_output]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        live = [self.requests[name][0] for name in self.engine.core.by_id]
        bound = 60 + 6 * sum(len(asked.prompt_token_ids) + asked.sampling.max_tokens for asked in live)
        for _ in range(bound):
            if not self.engine.core.streams:
                break
            self.check_plan(self.engine.step())
            self.engine.now += 1.0
        assert not self.engine.core.streams, "a request starved"
        self.blocks_are_whole()
        assert self.engine.core.scheduler.allocator.num_used == 0
        for name, (asked, inbox) in self.requests.items():
            self.check_reply(asked, inbox, self.truth[name])

    def check_reply(self, asked: GenerationRequest, inbox: Inbox, truth: list[int]) -> None:
        last = inbox.last
        text = bytes(truth).decode()
        assert inbox.text == text[: last.completion_tokens]
        if POISON in asked.prompt_token_ids:
            assert last.completion_tokens == 0
        if last.reason is FinishReason.DEADLINE:
            assert asked.first_token_by is not None
            assert asked.first_token_by <= self.engine.now
            assert last.completion_tokens == 0
        elif asked.request_id in self.cancelled or POISON in asked.prompt_token_ids:
            assert last.reason in (FinishReason.ABORT, FinishReason.ERROR)
        else:
            assert last.reason is (
                FinishReason.LENGTH if len(truth) == last.completion_tokens == self.most(asked) else FinishReason.STOP
            )
            assert inbox.text == text

    def most(self, asked: GenerationRequest) -> int:
        room = min(BOUNDS[-1], self.engine.core.scheduler.allocator.num_blocks * SIZE) - len(asked.prompt_token_ids)
        return min(asked.sampling.max_tokens, room)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.long
def test_many_lives() -> None:
    run_state_machine_as_test(Life, settings=settings(Life.TestCase.settings, max_examples=100))


def test_the_memory_model_notices_a_wrong_slot() -> None:
    """The state machine above finds faults only if its model notices them."""
    engine = SteppedEngine(MemoryRunner(8, SIZE, BOUNDS), speculation_rows=0)
    asked = request("r", [1] * 6, max_tokens=12, ignore_eos=True)
    inbox = engine.submit(asked)
    engine.step()
    runner = engine.runner
    assert isinstance(runner, MemoryRunner)
    runner.slots[engine.core.scheduler.running[0].block_table[0] * SIZE] = 999
    engine.run()
    assert inbox.text != bytes(said_alone(asked, 12)).decode()
    assert not torch.isnan(next_token_logits([1])).any()
