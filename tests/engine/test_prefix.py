"""Prefix reuse: a found block has the computed values, for the same tenant and rope, and no block is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serve_app.engine.scheduling.blocks import BlockAllocator, OutOfBlocks, extend_chain, root_key
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceStatus, TokenSequence
from tests.engine.fakes import live, request

SIZE = 4


def chain_of(tokens: list[int], tenant: str = "", length_class: int = 0) -> list[bytes]:
    chain = [root_key(tenant, length_class)]
    extend_chain(chain, tokens, SIZE, len(tokens) // SIZE)
    return chain[1:]


def publish_all(allocator: BlockAllocator, table: list[int], keys: list[bytes]) -> list[int]:
    for index, key in enumerate(keys):
        table[index] = allocator.publish(table, index, key, b"root")
    return table


def test_a_block_is_named_after_everything_before_it() -> None:
    a, b = chain_of([1] * 4 + [2] * 4), chain_of([3] * 4 + [2] * 4)
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert chain_of([1] * 11)[:2] == chain_of([1] * 8)
    assert len({*chain_of([1] * 8, "a"), *chain_of([1] * 8, "b"), *chain_of([1] * 8, "a", 1)}) == 6
    assert chain_of([1] * 4, "1", 1) != chain_of([1] * 4, "", 11) != chain_of([1] * 4, "1:", 1)


def test_a_chain_grown_in_pieces_is_the_same_chain() -> None:
    tokens = list(range(40))
    chain = [root_key("t", 0)]
    for blocks in (0, 1, 1, 4, 3, 10):
        extend_chain(chain, tokens, SIZE, blocks)
    assert chain[1:] == chain_of(tokens, "t")


def test_those_that_continue_a_block_are_evicted_before_it_and_the_least_recently_used_first() -> None:
    allocator = BlockAllocator(6, SIZE)
    old, new = chain_of([1] * 12), chain_of([2] * 12)
    for keys in (old, new):
        allocator.free(publish_all(allocator, allocator.allocate(3), keys))
    gone = []
    for _ in range(6):
        allocator.allocate(1)
        gone.append((len(allocator.find(old)), len(allocator.find(new))))
    assert gone == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_block_in_use_is_not_evicted() -> None:
    allocator = BlockAllocator(3, SIZE)
    keys = chain_of([1] * 8)
    allocator.free(publish_all(allocator, allocator.allocate(2), keys))
    allocator.share(allocator.find(keys[:1]))
    assert allocator.num_free == 2
    allocator.allocate(2)
    assert len(allocator.find(keys)) == 1
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)


def test_two_that_computed_the_same_share_one_block_afterwards() -> None:
    allocator = BlockAllocator(4, SIZE)
    keys = chain_of([1] * 4)
    first = publish_all(allocator, allocator.allocate(1), keys)
    second = publish_all(allocator, allocator.allocate(1), keys)
    assert first == second
    assert (allocator.num_used, allocator.num_free) == (1, 3)
    allocator.free(first)
    allocator.free(second)
    assert (allocator.num_used, allocator.num_cached) == (0, 1)


def test_an_empty_block_can_not_be_shared() -> None:
    with pytest.raises(ValueError, match="empty"):
        BlockAllocator(2, SIZE).share([0])


def make_scheduler(num_blocks: int, class_bounds: tuple[int, ...]) -> Scheduler:
    return Scheduler(
        BlockAllocator(num_blocks, SIZE),
        max_running=3,
        max_waiting=100,
        prefill_chunk=7,
        busy_chunk=lambda rows: 3,
        class_bounds=class_bounds,
    )


def make_sequence(number: int, prompt: list[int], output: int, tenant: str = "") -> TokenSequence:
    return TokenSequence(replace(request(str(number), prompt), tenant=tenant), number, 0.0, output)


def run_alone(scheduler: Scheduler, sequence: TokenSequence) -> int:
    """Run to the end with token 1 as every output. Returns the tokens that went through the model."""
    scheduler.add(sequence)
    computed = 0
    while sequence.status is not SequenceStatus.FINISHED:
        plan = scheduler.schedule()
        computed += plan.num_tokens
        for chunk in plan.chunks:
            samples = chunk.samples
            if samples:
                sequence.tokens.append(1)
            scheduler.computed(chunk, int(samples))
            if samples and sequence.num_output == sequence.max_output:
                scheduler.finish(sequence)
    return computed


def test_only_what_was_not_found_goes_through_the_model() -> None:
    scheduler = make_scheduler(32, (64,))
    assert run_alone(scheduler, make_sequence(0, [5] * 10, 4)) == 13
    again = make_sequence(1, [5] * 10, 4)
    assert run_alone(scheduler, again) == 5
    assert again.cached_tokens == 8
    turn = make_sequence(2, again.tokens + [6] * 3, 2)  # 13 of 14 tokens were computed: 3 blocks
    assert run_alone(scheduler, turn) == 18 - 12
    assert turn.cached_tokens == 12


def test_a_longer_length_class_finds_nothing_of_a_shorter_one() -> None:
    scheduler = make_scheduler(32, (16, 64))
    run_alone(scheduler, make_sequence(0, [5] * 12, 4))
    longer = make_sequence(1, [5] * 20, 1)
    run_alone(scheduler, longer)
    assert longer.cached_tokens == 0
    again = make_sequence(2, [5] * 18, 1)
    run_alone(scheduler, again)
    assert again.cached_tokens == 16


def test_a_preempted_sequence_finds_its_own_blocks_and_its_count_stays() -> None:
    scheduler = make_scheduler(16, (64,))
    sequence = make_sequence(0, [5] * 10, 20)
    scheduler.add(sequence)
    for _ in range(8):
        for chunk in scheduler.schedule().chunks:
            samples = chunk.samples
            if samples:
                sequence.tokens.append(1)
            scheduler.computed(chunk, int(samples))
    before = sequence.num_computed
    scheduler._preempt(sequence)
    plan = scheduler.schedule()
    assert plan.started == ()
    assert plan.chunks[0].start == before // SIZE * SIZE
    assert sequence.cached_tokens == 0


def step(scheduler: Scheduler) -> list[TokenSequence]:
    """One step in which every sequence that can says token 1. Returns the sequences that took part."""
    chunks = scheduler.schedule().chunks
    for chunk in chunks:
        samples = chunk.samples
        if samples:
            chunk.sequence.tokens.append(1)
        scheduler.computed(chunk, int(samples))
    return [chunk.sequence for chunk in chunks]


def test_a_prompt_that_is_cancelled_before_its_first_token_leaves_nothing_to_find() -> None:
    """It is not billed, so the next try must not be billed the cached price."""
    scheduler = make_scheduler(32, (64,))
    cancelled = make_sequence(0, [5] * 20, 4)
    scheduler.add(cancelled)
    for _ in range(2):
        step(scheduler)
    assert cancelled.num_computed == 14
    scheduler.finish(cancelled)
    again = make_sequence(1, [5] * 20, 4)
    assert run_alone(scheduler, again) == 23
    assert again.cached_tokens == 0


def test_others_find_a_prompt_from_its_first_token_on_also_if_it_is_cancelled_then() -> None:
    scheduler = make_scheduler(32, (64,))
    first, early, late, next_day = (make_sequence(number, [5] * 12, 4) for number in range(4))
    scheduler.add(first)
    step(scheduler)
    scheduler.add(early)
    step(scheduler)
    assert early.started
    assert early.cached_tokens == 0
    while not first.num_output:
        step(scheduler)
    scheduler.add(late)
    step(scheduler)
    assert late.cached_tokens == 8
    for sequence in (first, early, late):
        scheduler.finish(sequence)
    run_alone(scheduler, next_day)
    assert next_day.cached_tokens == 8


def test_a_prompt_preempted_before_its_first_token_is_not_computed_again_and_not_found_by_others() -> None:
    scheduler = make_scheduler(32, (64,))
    preempted, other = make_sequence(0, [5] * 20, 4), make_sequence(1, [5] * 20, 4)
    scheduler.add(preempted)
    for _ in range(2):
        step(scheduler)
    for _ in range(2):  # a second time with blocks that it had found as its own
        scheduler._preempt(preempted)
        chunk = scheduler.schedule().chunks[0]
        assert (chunk.sequence, chunk.start) == (preempted, 12)
    scheduler.add(other)
    scheduler.schedule()
    assert other.started
    assert other.cached_tokens == 0
    scheduler.finish(other)
    scheduler.computed(chunk)
    while preempted.num_output < 2:
        step(scheduler)
    scheduler.finish(preempted)
    later = make_sequence(2, [5] * 20, 4)
    run_alone(scheduler, later)
    assert later.cached_tokens == 16


def test_what_a_failed_request_has_computed_is_not_found() -> None:
    """It is not billed. What it found itself was paid before and stays."""
    scheduler = make_scheduler(32, (64,))
    run_alone(scheduler, make_sequence(0, [5] * 8, 2))
    failed = make_sequence(1, [5] * 8 + [6] * 12, 9)
    scheduler.add(failed)
    while failed.num_output < 3:
        step(scheduler)
    assert failed.cached_tokens == 8
    scheduler.finish(failed, billed=False)
    again = make_sequence(2, [5] * 8 + [6] * 12, 9)
    run_alone(scheduler, again)
    assert again.cached_tokens == 8
    assert scheduler.allocator.num_used == 0


def test_a_preempted_sequence_that_finds_everything_decodes_in_the_same_step() -> None:
    scheduler = make_scheduler(16, (64,))
    sequence = make_sequence(0, [5] * 7, 20)
    scheduler.add(sequence)
    while sequence.num_computed < 8:
        for chunk in scheduler.schedule().chunks:
            samples = chunk.samples
            if samples:
                sequence.tokens.append(1)
            scheduler.computed(chunk, int(samples))
    scheduler._preempt(sequence)
    assert [(c.start, c.length) for c in scheduler.schedule().chunks] == [(8, 1)]


class Life(RuleBasedStateMachine):
    """Arrivals, turns, steps, failures and cancellations over a pool of a few blocks and a model of its memory.

    A slot of the memory says whose and which tokens its K and V stand for. Answers are a function of the tokens alone,
    so replies of different sequences share prefixes, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(9, (14, 36))
        self.memory: dict[tuple[int, int], tuple[str, int, tuple[int, ...]]] = {}
        self.said: list[TokenSequence] = []
        self.arrived: list[TokenSequence] = []
        self.count = 0

    @rule(
        tenant=st.sampled_from("ab"),
        prompt=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=24),
        output=st.integers(1, 8),
    )
    def arrive(self, tenant: str, prompt: list[int], output: int) -> None:
        self.arrived.append(make_sequence(self.count, prompt, output, tenant))
        self.scheduler.add(self.arrived[-1])
        self.count += 1

    @precondition(lambda self: self.said)
    @rule(data=st.data(), suffix=st.lists(st.integers(0, 1), max_size=5), output=st.integers(1, 4))
    def next_turn(self, data: st.DataObject, suffix: list[int], output: int) -> None:
        last = data.draw(st.sampled_from(self.said))
        self.arrive(last.request.tenant, (last.tokens + suffix)[:32], output)

    @rule(outcome=st.sampled_from(["fine"] * 8 + ["fails", "nan"]), cancelled=st.integers(0, 20))
    def step(self, outcome: str, cancelled: int) -> None:
        allocator = self.scheduler.allocator
        waiting = {s: allocator.find(self.chain(s)[: (len(s.tokens) - 1) // SIZE]) for s in live(self.scheduler)}
        preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        preempted = self.scheduler.num_preemptions > preemptions
        assert bool(plan.chunks) == bool(self.scheduler.running)
        for sequence in plan.started:
            assert sequence.cached_tokens <= sequence.num_prompt - 1
            if sequence.status is SequenceStatus.WAITING:
                continue  # it has yielded to another tenant's request within the same plan
            assert sequence.cached_tokens == sequence.num_computed
            if plan.started[0] is sequence and not preempted and len(self.scheduler.running) == 1:
                assert sequence.cached_tokens == SIZE * len(waiting[sequence])
        for chunk in plan.chunks:  # all write before any is committed
            sequence = chunk.sequence
            assert chunk.start == sequence.num_computed
            for position in range(chunk.start, chunk.start + chunk.length):
                block = sequence.block_table[position // SIZE]
                assert allocator._keys[block] is None, "a block that others can find is written to"
                self.memory[block, position % SIZE] = self.content(sequence, position)
        if outcome == "fails":
            for chunk in plan.chunks:
                for position in range(chunk.start, chunk.start + chunk.length):
                    self.memory[chunk.sequence.block_table[position // SIZE], position % SIZE] = ("", -1, ())
                self.scheduler.finish(chunk.sequence)
            return
        for sequence in live(self.scheduler):
            if sequence.arrival == self.count - 1 - cancelled:
                self.scheduler.finish(sequence)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            samples = chunk.samples
            if samples:
                sequence.tokens.append(self.answer(sequence.tokens))
            self.scheduler.computed(chunk, int(samples))
            if samples and sequence.num_output == sequence.max_output:
                self.scheduler.finish(sequence)
                self.said.append(sequence)
        if outcome == "nan" and (condemned := next((c.sequence for c in plan.chunks if c.sequence.chain), None)):
            own = condemned.request.tenant, condemned.length_class
            others = [key for key, block in allocator._index.items() if self.memory[block, SIZE - 1][:2] != own]
            self.scheduler.condemn(condemned)
            assert list(allocator._index) == others

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        if sequences := live(self.scheduler):
            self.scheduler.finish(sequences[which % len(sequences)])

    @invariant()
    def every_sequence_sees_its_own_tokens(self) -> None:
        for sequence in self.scheduler.running:
            for position in range(sequence.num_computed):
                slot = sequence.block_table[position // SIZE], position % SIZE
                assert self.memory[slot] == self.content(sequence, position)

    @invariant()
    def what_can_be_found_is_what_its_name_says(self) -> None:
        allocator = self.scheduler.allocator
        for key, block in allocator._index.items():
            tenant, length_class, tokens = self.memory[block, SIZE - 1]
            assert key in self.names(chain_of(list(tokens), tenant, length_class)[-1])
            for offset in range(SIZE):
                before = tokens[: len(tokens) - SIZE + offset + 1]
                assert self.memory[block, offset] == (tenant, length_class, before)
            assert allocator._keys[block] == key
        assert len(set(allocator._index.values())) == len(allocator._index)
        assert sum(key is not None for key in allocator._keys) == len(allocator._index)

    @invariant()
    def blocks_are_in_use_or_cached_or_empty(self) -> None:
        allocator = self.scheduler.allocator
        held = Counter(block for s in self.scheduler.running for block in s.block_table)
        assert all(allocator._references[block] == held[block] for block in range(allocator.num_blocks))
        states = [*held, *allocator._cached, *allocator._empty]
        assert sorted(states) == list(range(allocator.num_blocks)), "a block was lost or is two things at once"
        assert all(allocator._keys[block] is not None for block in allocator._cached)
        assert all(allocator._keys[block] is None for block in allocator._empty)
        assert (allocator.num_used, allocator.num_cached) == (len(held), len(allocator._cached))
        assert not any(s.block_table for s in self.scheduler.waiting)

    @invariant()
    def none_outlives_what_it_continues(self) -> None:
        allocator = self.scheduler.allocator
        place = {block: order for order, block in enumerate(allocator._cached)}
        for block in allocator._index.values():
            tenant, length_class, tokens = self.memory[block, SIZE - 1]
            if len(tokens) > SIZE:
                names = self.names(chain_of(list(tokens), tenant, length_class)[-2])
                before = [allocator._index[name] for name in names if name in allocator._index]
                assert any(place.get(block, -1) < place.get(one, allocator.num_blocks) for one in before)

    def teardown(self) -> None:
        for _ in range(2000):
            if not live(self.scheduler):
                break
            self.step("fine", 10**6)
        assert not live(self.scheduler), "a sequence starved"
        assert self.scheduler.allocator.num_used == 0
        for sequence in self.said:
            tokens = list(sequence.request.prompt_token_ids)
            while len(tokens) < len(sequence.tokens):
                tokens.append(self.answer(tokens))
            assert sequence.tokens == tokens
            assert sequence.num_output == sequence.max_output
        self.blocks_are_in_use_or_cached_or_empty()

    def names(self, key: bytes) -> list[bytes]:
        """Under which a block may be found: by all, or by the sequence alone that has computed it unpaid."""
        return [key, *(sequence.own_key(key) for sequence in self.arrived)]

    @staticmethod
    def answer(tokens: list[int]) -> int:
        return int(sum(tokens) % 3 == 0)

    def chain(self, sequence: TokenSequence) -> list[bytes]:
        length_class = self.scheduler._length_class(len(sequence.tokens))
        return chain_of(sequence.tokens, sequence.request.tenant, length_class)

    @staticmethod
    def content(sequence: TokenSequence, position: int) -> tuple[str, int, tuple[int, ...]]:
        return sequence.request.tenant, sequence.length_class, tuple(sequence.tokens[: position + 1])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)


@pytest.mark.slow
@pytest.mark.long
def test_many_lives() -> None:
    run_state_machine_as_test(Life, settings=settings(Life.TestCase.settings, max_examples=100))
