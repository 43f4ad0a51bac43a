"""The fair queue: no tenant waits behind another's flood or earns credit in a pause; shares stay within the bound."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contracts.generation import Delta
from serve_app.engine.errors import QueueFull
from serve_app.engine.scheduling.blocks import BlockAllocator
from serve_app.engine.scheduling.fair_queue import (
    FairQueue,
    limit_long_prompts,
    share_evenly,
    share_prefill_among_tenants,
)
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import Chunk, SequenceStatus, TokenSequence
from tests.engine.fakes import FakeRunner, SteppedEngine, live, request


def make_sequence(number: int, tenant: str, prompt: int = 4, output: int = 4) -> TokenSequence:
    return TokenSequence(replace(request(str(number), [number % 97] * prompt), tenant=tenant), number, 0.0, output)


def take(queue: FairQueue, output: int = 0) -> str:
    """Admit the next and charge it at once; its tenant."""
    expected = queue.peek()
    sequence = queue.pop()
    assert sequence is expected
    queue.count_served(sequence, prompt_tokens=sequence.num_prompt, output_tokens=output)
    return sequence.request.tenant


def test_a_newcomer_goes_before_the_rest_of_a_flood() -> None:
    queue = FairQueue()
    for number in range(50):
        queue.push(make_sequence(number, "flood"))
    assert [take(queue) for _ in range(3)] == ["flood"] * 3
    queue.push(make_sequence(50, "single"))
    assert take(queue) == "single"


def test_newcomers_go_in_the_order_in_which_they_came() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(make_sequence(number, "flood"))
    take(queue)
    for number, tenant in enumerate("xyz", start=10):
        queue.push(make_sequence(number, tenant))
    assert [take(queue) for _ in range(3)] == ["x", "y", "z"]


def test_a_pause_earns_no_credit() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.push(make_sequence(number, "busy"))
    for _ in range(40):
        take(queue)
    for number in range(100, 140):
        queue.push(make_sequence(number, "back"))
    turns = [take(queue) for _ in range(40)]
    assert turns.count("back") == 20


def test_a_tenant_that_comes_to_an_empty_queue_starts_at_the_service_of_the_last_one() -> None:
    queue = FairQueue()
    queue.push(make_sequence(0, "a", prompt=100))
    take(queue)
    queue.push(make_sequence(1, "b", prompt=10))
    for number in range(2, 8):
        queue.push(make_sequence(number, "a", prompt=10))
        queue.push(make_sequence(number + 10, "b", prompt=10))
    turns = [take(queue) for _ in range(10)]
    assert turns.count("a") == turns.count("b") == 5


def test_long_replies_count_as_they_are_produced() -> None:
    queue = FairQueue(prompt_weight=1, output_weight=2)
    for number in range(40):
        queue.push(make_sequence(number, "long" if number % 2 else "short", prompt=4))
    turns = []
    for _ in range(18):
        head = queue.peek()
        assert head is not None
        turns.append(take(queue, output=10 if head.request.tenant == "long" else 1))
    assert turns.count("short") in (14, 15, 16)  # 24 to 6 a request


def test_only_the_tenants_charged_last_are_remembered() -> None:
    queue = FairQueue(remembered=8)
    for number in range(100):
        queue.push(make_sequence(number, str(number)))
        if number % 2:
            take(queue)
    assert len(queue._services) <= 8 + len(queue._queues)
    assert len([take(queue) for _ in range(50)]) == 50


def test_an_empty_queue_is_reported_as_empty() -> None:
    queue = FairQueue()
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(KeyError):
        queue.withdraw(make_sequence(0, "a"))


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(0, 3), st.integers(1, 9))))
def test_each_request_leaves_once_and_in_order_within_its_tenant(operations: list[tuple[str, int, int]]) -> None:
    queue, inside, popped = FairQueue(remembered=3), [], []
    for number, (operation, which, size) in enumerate(operations):
        if operation == "push":
            inside.append(make_sequence(number, "abcd"[which], size))
            queue.push(inside[-1])
        elif operation == "pop" and inside:
            popped.append(queue.pop())
            queue.count_served(popped[-1], prompt_tokens=size)
            assert popped[-1] is next(s for s in inside if s.request.tenant == popped[-1].request.tenant)
            inside.remove(popped[-1])
        elif inside:
            queue.withdraw(inside.pop(which % len(inside)))
        assert len(queue) == len(inside)
        assert set(queue) == set(inside)
    while inside:
        inside.remove(queue.pop())
    assert queue.peek() is None


@pytest.mark.parametrize("count", [10, pytest.param(80, marks=[pytest.mark.slow, pytest.mark.long])])
def test_tenants_that_always_wait_get_the_same_service_within_the_papers_bound(count: int) -> None:
    """Over any stretch of time, service differs by at most 2·max(w_p·L, w_o·M)."""
    chance = random.Random(0)
    for _ in range(count):
        check_service(chance, chance.randint(1, 6), chance.randint(2, 4))


def check_service(chance: random.Random, max_running: int, tenants: int) -> None:
    longest = {t: (chance.randint(1, 40), chance.randint(1, 20)) for t in "abcd"[:tenants]}  # prompt, reply
    queue = FairQueue()
    scheduler = Scheduler(
        BlockAllocator(max_running * 20, 4),
        max_running=max_running,
        max_waiting=1000,
        prefill_chunk=chance.randint(1, 64),
        busy_chunk=lambda rows: chance.randint(1, 64),
        prefix_reuse=chance.random() < 0.5,
        queue=queue,
    )
    served = dict.fromkeys(longest, 0.0)
    gaps: dict[tuple[str, str], list[float]] = {(f, g): [] for f, g in pairwise(longest)}
    number, most_at_once = 0, 0
    for _ in range(200):
        for tenant, (prompt, output) in longest.items():
            while sum(s.request.tenant == tenant for s in queue) < max_running + 1:
                number += 1
                sequence = make_sequence(number, tenant, chance.randint(1, prompt), chance.randint(1, output))
                scheduler.add(sequence)
        plan = scheduler.schedule()
        for sequence in plan.started:
            served[sequence.request.tenant] += sequence.num_prompt - sequence.cached_tokens
        for chunk in plan.chunks:
            samples = chunk.samples
            if samples:
                served[chunk.sequence.request.tenant] += 2
                chunk.sequence.tokens.append(number % 89)
            scheduler.computed(chunk, int(samples))
        most_at_once = max(most_at_once, sum(len(s.tokens) for s in [*scheduler.running, *scheduler.waiting]))
        for chunk in plan.chunks:
            if chunk.sequence.num_output == chunk.sequence.max_output:
                scheduler.finish(chunk.sequence)
        for (f, g), gap in gaps.items():
            gap.append(served[f] - served[g])
    bound = 2 * max(1 * max(prompt for prompt, _ in longest.values()), 2 * most_at_once)
    for gap in gaps.values():
        assert max(gap) - min(gap) <= bound  # the most over any stretch


def test_a_weight_buys_its_share() -> None:
    queue = FairQueue()
    for number in range(60):
        tenant = "double" if number % 2 else "single"
        sequence = make_sequence(number, tenant)
        sequence.request = replace(sequence.request, weight=2.0 if number % 2 else 1.0)
        queue.push(sequence)
    turns = [take(queue) for _ in range(30)]
    assert turns.count("double") == 20


def test_a_request_that_is_put_back_goes_before_later_ones_of_its_tenant_and_gains_no_credit() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(make_sequence(number, "a"))
    popped = [queue.pop(), queue.pop()]
    queue.count_served(popped[0], output_tokens=50)
    queue.push(make_sequence(3, "b"))
    for sequence in reversed(popped):
        queue.restore(sequence)
    assert [queue.pop().arrival for _ in range(4)] == [3, 0, 1, 2]


def test_a_tenant_that_cancels_its_prompts_is_charged_for_them_and_waits_behind_others() -> None:
    scheduler = Scheduler(
        BlockAllocator(64, 4),
        max_running=1,
        max_waiting=50,
        prefill_chunk=8,
        busy_chunk=lambda rows: 8,
        queue=FairQueue(),
    )
    numbers = itertools.count()
    modest = dict.fromkeys("bc", 0)

    def enter(tenant: str, prompt: int) -> None:
        scheduler.add(make_sequence(next(numbers), tenant, prompt=prompt, output=1))

    enter("a", 100)
    for _ in range(30):
        [chunk] = scheduler.schedule().chunks
        scheduler.computed(chunk)
        running = chunk.sequence
        assert running.request.tenant == "a"
        enter("a", 100)
        for tenant in modest:
            enter(tenant, 4)
        scheduler.finish(running)  # cancelled long before its first token
        for _ in modest:  # both go before its next prompt
            [chunk] = scheduler.schedule().chunks
            modest[chunk.sequence.request.tenant] += 1
            scheduler.computed(chunk)
            scheduler.finish(chunk.sequence)
    assert modest == {"b": 30, "c": 30}


def test_a_full_queue_accepts_tenants_below_their_share_but_never_twice_its_size() -> None:
    scheduler = Scheduler(
        BlockAllocator(64, 4),
        max_running=1,
        max_waiting=6,
        prefill_chunk=8,
        busy_chunk=lambda rows: 8,
        queue=FairQueue(),
    )
    numbers = itertools.count()

    def enters(tenant: str) -> int:
        taken = 0
        for _ in range(20):
            with contextlib.suppress(QueueFull):
                scheduler.add(make_sequence(next(numbers), tenant))
                taken += 1
        return taken

    assert enters("flood") == 6 + 1  # one of them has a free slot
    assert enters("b") == 3
    assert enters("flood") == 0
    assert enters("c") == 2
    assert enters("d") == 1
    for number in range(100):
        enters(str(number))
    assert scheduler.num_waiting == 2 * 6 + 1


def cost(chunks: Sequence[Chunk]) -> float:
    """Seconds of a step, as int8 steps of the bundled model go: a batch of four costs what one row costs."""
    return 0.008 + 0.001 * max(4, sum(chunk.length for chunk in chunks))


def time_to_first_token(flood: int, *, prompt: int, reply: int, num_blocks: int, max_running: int = 32) -> float:
    """Seconds until B's only request has its first token, while A has `flood` requests and some of them stream."""
    runner = FakeRunner(b"x" * 5000, num_blocks=num_blocks, max_context=4096)
    runner.cost = cost
    engine = SteppedEngine(runner, max_running=max_running, max_waiting=64, block_size=16, speculation_rows=0)
    engine.submit(request("stream", tenant="a", max_tokens=30))  # after which the costs of steps are known
    for number in range(3):
        engine.step()
        engine.submit(request(f"prompt{number}", [7] * 90, "a", max_tokens=1))
    engine.run()
    for number in range(flood):
        asked = request(f"a{number}", [number + 1] * prompt, "a", max_tokens=reply)
        engine.submit(asked)
    for _ in range(60):
        engine.step()
    began = engine.now
    inbox = engine.submit(request("b", [99] * prompt, "b", max_tokens=20))
    while Delta not in inbox.first:
        engine.step()
    first = engine.now - began
    assert engine.core.stats(0.0).preemptions <= 2 * (flood + 1) or num_blocks < 1000
    for name in list(engine.core.by_id):
        engine.abort(name)
    assert engine.core.scheduler.allocator.num_used == 0
    return first


@pytest.mark.parametrize(
    ("prompt", "reply", "num_blocks"),
    [(40, 300, 4000), (300, 300, 4000), (600, 300, 4000), (300, 300, 250)],
    ids=["long replies", "longer prompts", "prompts that take long", "little memory"],
)
def test_a_single_requests_first_token_comes_within_twice_the_time_beside_two_requests_although_fifty_wait(
    prompt: int, reply: int, num_blocks: int
) -> None:
    calm = time_to_first_token(2, prompt=prompt, reply=reply, num_blocks=num_blocks)
    assert time_to_first_token(50, prompt=prompt, reply=reply, num_blocks=num_blocks) <= 2 * calm


def drive(scheduler: Scheduler) -> None:
    for chunk in scheduler.schedule().chunks:
        samples = chunk.samples
        if samples:
            chunk.sequence.tokens.append(1)
        scheduler.computed(chunk, int(samples))


def slots(scheduler: Scheduler) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in scheduler.running)


def crowded(num_blocks: int = 64, **options: object) -> Scheduler:
    """Tenant a holds all four slots, with long replies."""
    defaults = {"max_running": 4, "max_waiting": 99, "prefill_chunk": 64, "busy_chunk": lambda rows: 64}
    scheduler = Scheduler(BlockAllocator(num_blocks, 4), queue=FairQueue(), **{**defaults, **options})  # type: ignore[arg-type]
    for number in range(8):
        scheduler.add(make_sequence(number, "a", output=100))
    for _ in range(3):
        drive(scheduler)
    return scheduler


def test_the_youngest_request_of_a_tenant_with_all_slots_yields_and_continues_later() -> None:
    scheduler = crowded()
    youngest = scheduler.running[-1]
    said = list(youngest.tokens)
    newcomer = make_sequence(50, "b", output=2)
    scheduler.add(newcomer)
    drive(scheduler)
    assert slots(scheduler) == {"a": 3, "b": 1}
    assert youngest not in scheduler.running
    assert youngest.tokens == said
    scheduler.finish(newcomer)
    drive(scheduler)
    assert youngest in scheduler.running  # before a's others, which never ran
    assert youngest.tokens[: len(said)] == said


def test_no_tenant_takes_a_second_slot_from_others_or_loses_its_last() -> None:
    scheduler = crowded()
    for number, tenant in enumerate("bbbccddee", start=50):
        scheduler.add(make_sequence(number, tenant, output=100))
    for _ in range(20):
        drive(scheduler)
    assert slots(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert scheduler.num_preemptions == 3


def test_no_request_yields_twice_so_that_a_crowd_of_short_requests_does_not_thrash() -> None:
    scheduler = crowded()
    for number in range(50, 90):
        newcomer = make_sequence(number, "b", output=1)
        scheduler.add(newcomer)
        drive(scheduler)
        if newcomer.status is not SequenceStatus.FINISHED:
            scheduler.finish(newcomer)
    assert scheduler.num_preemptions <= 8


def test_a_tenant_that_was_served_more_takes_no_slot_from_others() -> None:
    scheduler = crowded()
    greedy = make_sequence(50, "b", output=100)
    scheduler.waiting.count_served(greedy, output_tokens=1000)
    scheduler.add(greedy)
    drive(scheduler)
    assert slots(scheduler) == {"a": 4}


def test_memory_is_claimed_up_to_an_even_share_and_no_further() -> None:
    scheduler = crowded(num_blocks=24, max_running=8, prefix_reuse=False)
    for _ in range(3):
        drive(scheduler)
    assert slots(scheduler)["a"] > 2
    scheduler.add(make_sequence(50, "b", prompt=4 * 13, output=1))
    before = slots(scheduler)
    drive(scheduler)
    assert slots(scheduler)["b"] == 0  # more than half of the blocks
    assert slots(scheduler)["a"] >= before["a"] - 1
    scheduler.add(make_sequence(51, "c", prompt=4 * 8, output=1))
    scheduler.waiting.withdraw(next(s for s in scheduler.waiting if s.request.tenant == "b"))
    drive(scheduler)
    assert slots(scheduler)["c"] == 1
    assert slots(scheduler)["a"] >= 1


def test_a_flood_makes_room_for_itself_when_blocks_run_out() -> None:
    scheduler = Scheduler(
        BlockAllocator(12, 4),
        max_running=4,
        max_waiting=99,
        prefill_chunk=64,
        busy_chunk=lambda rows: 64,
        prefix_reuse=False,
        queue=FairQueue(),
    )
    for number, tenant in enumerate("aaab"):
        scheduler.add(make_sequence(number, tenant, output=30))
    while not scheduler.num_preemptions:
        drive(scheduler)
    assert slots(scheduler)["b"] == 1  # the youngest of all, but the only one of its tenant


def test_a_steps_prompt_tokens_are_shared_among_tenants() -> None:
    prompts = [("a", 100), ("a", 50), ("a", 10), ("b", 100)]
    assert share_prefill_among_tenants(prompts, 64) == [16, 6, 10, 32]
    assert share_prefill_among_tenants(prompts, 64, {"a"}) == [11, 1, 10, 42]
    assert share_prefill_among_tenants([("a", 100), ("b", 4), ("c", 100)], 64) == [30, 4, 30]
    assert share_prefill_among_tenants([("a", 100), ("b", 4), ("c", 2)], 1) == [1, 0, 0]
    assert share_prefill_among_tenants([], 64) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=8), st.integers(1, 90))
def test_the_budget_is_used_up_and_the_oldest_always_advances(prompts: list[tuple[str, int]], budget: int) -> None:
    shares = share_prefill_among_tenants(prompts, budget)
    assert sum(shares) == min(budget, sum(need for _, need in prompts))
    assert all(0 <= share <= need for share, (_, need) in zip(shares, prompts, strict=True))
    assert not prompts or shares[0] >= 1


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(0, 90))
def test_shares_are_even_except_where_a_tenant_needs_less(needs: list[int], budget: int) -> None:
    shares = share_evenly(needs, budget)
    assert sum(shares) == min(budget, sum(needs))
    unmet = [share for share, need in zip(shares, needs, strict=True) if share < need]
    assert all(share <= min(unmet, default=99) + 2 for share in shares)


def test_several_requests_yield_if_one_frees_too_little_and_none_if_all_free_too_little() -> None:
    def full(prompt: int) -> Scheduler:
        scheduler = crowded(num_blocks=20, max_running=8, prefix_reuse=False)
        assert slots(scheduler)["a"] >= 6
        scheduler.add(make_sequence(50, "b", prompt=prompt, output=1))
        drive(scheduler)
        return scheduler

    claimed = full(4 * 7)
    assert slots(claimed)["b"] == 1
    assert sum(sequence.yielded for sequence in live(claimed)) >= 2
    refused = full(4 * 11)  # more than half of the blocks
    assert slots(refused)["b"] == 0
    assert not any(sequence.yielded for sequence in live(refused))


@pytest.mark.parametrize(
    ("prompts", "kept"),
    [
        ([("a", 5000), ("a", 4000), ("a", 30)], [64, 0, 30]),
        ([("a", 5000), ("b", 20), ("b", 900), ("a", 100)], [32, 20, 32, 0]),
        ([("a", 64), ("b", 1)], [64, 1]),
        ([], []),
    ],
)
def test_long_prompts_share_one_limit_and_short_ones_keep_what_they_need(
    prompts: list[tuple[str, int]], kept: list[int]
) -> None:
    long = {index for index, (_, tokens) in enumerate(prompts) if tokens > 64}
    assert [tokens for _, tokens in limit_long_prompts(prompts, long, 64)] == kept


def test_long_prompts_have_every_second_step_while_other_accounts_have_short_ones() -> None:
    scheduler = Scheduler(
        BlockAllocator(600, 4),
        max_running=16,
        max_waiting=99,
        prefill_chunk=64,
        busy_chunk=lambda rows: 64,
        long_chunk=lambda: 8,
    )

    def computed() -> Counter[str]:
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            scheduler.computed(chunk)
        for chunk in plan.chunks:
            if chunk.sequence.num_pending == 0:
                scheduler.finish(chunk.sequence)
        lengths: Counter[str] = Counter()
        for chunk in plan.chunks:
            lengths[chunk.sequence.request.tenant] += chunk.length
        return lengths

    scheduler.add(make_sequence(0, "book", prompt=1000))
    assert computed() == {"book": 8}
    for number in range(1, 4):  # one more short prompt before each step, all the time
        scheduler.add(make_sequence(2 * number, "short", prompt=40))
        assert computed() == {"short": 40}
        scheduler.add(make_sequence(2 * number + 1, "short", prompt=40))
        assert computed() == {"book": 8, "short": 40}
    scheduler.add(make_sequence(20, "book", prompt=40))  # its own short prompt takes nothing from it
    assert computed() == {"book": 48}


def test_a_short_prompt_waits_for_no_long_step_of_another_account() -> None:
    """Eight prompts of 4,000 tokens, a step of which takes a millisecond for each token."""
    runner = FakeRunner(b"x" * 5000, num_blocks=4000, max_context=8192)
    runner.cost = lambda chunks: 0.001 * sum(chunk.length for chunk in chunks)
    engine = SteppedEngine(runner, max_running=16, max_waiting=64, block_size=16, prefill_chunk=512)
    for number in range(8):
        engine.submit(request(f"a{number}", [number + 1] * 4000, "a", max_tokens=1))
    for _ in range(10):
        engine.step()
    began = engine.now
    inbox = engine.submit(request("b", [99] * 40, "b", max_tokens=1))
    while Delta not in inbox.first:
        engine.step()
    assert engine.now - began <= 0.15
