from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.errors import QueueFull
from serve_app.engine.scheduling.blocks import BlockAllocator, OutOfBlocks
from serve_app.engine.scheduling.fair_queue import share_prefill
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceStatus, TokenSequence
from tests.engine.fakes import live, request


def make_scheduler(num_blocks: int = 16, **options: object) -> Scheduler:
    """Without prefix reuse, whose own tests are in test_prefix."""
    defaults = {
        "max_running": 4,
        "max_waiting": 100,
        "prefill_chunk": 8,
        "busy_chunk": lambda rows: 4,
        "prefix_reuse": False,
    }
    return Scheduler(BlockAllocator(num_blocks, 4), **{**defaults, **options})  # type: ignore[arg-type]


def make_sequence(number: int, prompt: int = 4, output: int = 4) -> TokenSequence:
    return TokenSequence(request(str(number), [7] * prompt), number, 0.0, output)


def advance(scheduler: Scheduler) -> list[TokenSequence]:
    """Do a step as the engine would: every token is followed by the number of tokens before it."""
    plan = scheduler.schedule()
    check_blocks(scheduler)
    done = []
    for chunk in plan.chunks:
        sequence = chunk.sequence
        assert chunk.start == sequence.num_computed
        assert scheduler.allocator.blocks_for(chunk.start + chunk.length) <= len(sequence.block_table)
        samples = chunk.samples
        if samples:
            sequence.tokens.append(len(sequence.tokens))
        scheduler.computed(chunk, int(samples))
        if samples and sequence.num_output == sequence.max_output:
            scheduler.finish(sequence)
            done.append(sequence)
    check_blocks(scheduler)
    return done


def check_blocks(scheduler: Scheduler) -> None:
    owned = [block for sequence in scheduler.running for block in sequence.block_table]
    assert len(owned) == len(set(owned)), "a block with two owners"
    assert len(owned) == scheduler.allocator.num_used, "a block was lost"
    assert not any(sequence.block_table for sequence in scheduler.waiting)


def test_a_block_is_free_again_only_after_its_last_reference() -> None:
    allocator = BlockAllocator(2, 4)
    blocks = allocator.allocate(2)
    allocator.share(blocks[:1])
    allocator.free(blocks)
    assert allocator.num_free == 1
    allocator.free(blocks[:1])
    assert allocator.num_free == 2
    with pytest.raises(ValueError, match="already free"):
        allocator.free(blocks[:1])


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    allocator = BlockAllocator(3, 4)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(4)
    assert allocator.num_free == 3


def test_a_long_prompt_holds_running_streams_up_by_one_small_chunk_at_most() -> None:
    scheduler = make_scheduler(num_blocks=64)
    scheduler.add(make_sequence(0, prompt=4, output=30))
    advance(scheduler)
    scheduler.add(make_sequence(1, prompt=40))
    for _ in range(10):
        plan = scheduler.schedule()
        assert plan.chunks[0].sequence.arrival == 0
        assert plan.num_tokens <= 1 + 4
        advance(scheduler)


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    assert share_prefill([1000, 10], 64) == [54, 10]
    assert share_prefill([1000, 900, 10], 64) == [32, 22, 10]
    assert share_prefill([5], 64) == [5]
    assert share_prefill([], 64) == []


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 40))
def test_the_prefill_budget_is_never_exceeded_nor_left_over(remaining: list[int], budget: int) -> None:
    shares = share_prefill(remaining, budget)
    assert sum(shares) == min(budget, sum(remaining))
    assert all(0 <= share <= need for share, need in zip(shares, remaining, strict=True))
    assert not remaining or shares[0] >= 1


def test_the_youngest_makes_room_when_blocks_run_out_and_keeps_its_text() -> None:
    scheduler = make_scheduler(num_blocks=5)
    old, young = make_sequence(0, prompt=4, output=12), make_sequence(1, prompt=4, output=8)
    scheduler.add(old)
    scheduler.add(young)
    done: list[TokenSequence] = []
    while not done:
        done += advance(scheduler)
    assert done == [old]
    assert scheduler.num_preemptions > 0
    while young not in done:
        done += advance(scheduler)
    assert young.tokens == [7] * 4 + list(range(4, 12))


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    scheduler = make_scheduler(num_blocks=5)
    for number in range(3):
        scheduler.add(make_sequence(number, prompt=4, output=12))
    order = []
    while len(order) < 3:
        order += [s.arrival for s in advance(scheduler)]
    assert order == [0, 1, 2]


def test_a_queue_refuses_what_exceeds_its_bound() -> None:
    scheduler = make_scheduler(max_running=1, max_waiting=2)
    for number in range(3):
        scheduler.add(make_sequence(number))
    with pytest.raises(QueueFull):
        scheduler.add(make_sequence(3))
    scheduler.schedule()
    assert scheduler.num_waiting == 2
    with pytest.raises(QueueFull):
        scheduler.add(make_sequence(3))


def test_a_cancelled_sequence_leaves_from_any_state() -> None:
    scheduler = make_scheduler(num_blocks=4, max_running=2)
    sequences = [make_sequence(number, prompt=4, output=8) for number in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.num_preemptions:
        advance(scheduler)
    for sequence in sequences:
        scheduler.finish(sequence)
        scheduler.finish(sequence)
        check_blocks(scheduler)
    assert live(scheduler) == []
    assert scheduler.allocator.num_used == 0


def test_a_sequence_that_outgrows_its_length_class_is_computed_anew_in_the_next() -> None:
    scheduler = make_scheduler(class_bounds=(8, 16))
    sequence = make_sequence(0, prompt=6, output=6)
    scheduler.add(sequence)
    seen = []
    while sequence.status is not SequenceStatus.FINISHED:
        plan = scheduler.schedule()
        seen.append((plan.chunks[0].start, plan.chunks[0].length, sequence.length_class))
        advance(scheduler)
    assert seen[:3] == [(0, 6, 0), (6, 1, 0), (7, 1, 0)]
    assert seen[3] == (0, 8, 1)  # a chunk of the 9 tokens there are by now
    assert sequence.tokens == [7] * 6 + list(range(6, 12))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 14), st.integers(1, 5))
def test_for_any_arrivals_no_block_is_lost_and_each_sequence_gets_exactly_its_tokens(
    seed: int, num_blocks: int, max_running: int
) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(num_blocks=num_blocks, max_running=max_running, class_bounds=(9, num_blocks * 4))
    expected, finished = {}, []
    for number in range(12):
        prompt = chance.randint(1, num_blocks * 4 - 1)
        sequence = make_sequence(number, prompt, chance.randint(1, min(10, num_blocks * 4 - prompt)))
        scheduler.add(sequence)
        expected[number] = sequence
        for _ in range(chance.randint(0, 4)):
            finished += advance(scheduler)
        if chance.random() < 0.25:
            victim = expected.pop(chance.choice(list(expected)))
            if victim.status is not SequenceStatus.FINISHED:
                scheduler.finish(victim)
            else:
                finished.remove(victim)
            check_blocks(scheduler)
    bound = 50 * sum(s.num_prompt + s.max_output for s in expected.values()) + 1
    for _ in range(bound):
        if not live(scheduler):
            break
        finished += advance(scheduler)
    assert {s.arrival for s in finished} == set(expected), "a sequence starved"
    for sequence in expected.values():
        start, end = sequence.num_prompt, sequence.num_prompt + sequence.max_output
        assert sequence.tokens == [7] * start + list(range(start, end))
    assert scheduler.allocator.num_used == 0
