"""The fair queue: nobody waits behind another's flood, nobody saves up service, and shares stay within the bound."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.blocks import BlockAllocator
from serve_app.engine.fair_queue import FairQueue
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.sequence import Sequence
from tests.engine.fakes import request


def make_sequence(number: int, tenant: str, prompt: int = 4, output: int = 4) -> Sequence:
    return Sequence(replace(request(str(number), [number % 97] * prompt), tenant=tenant), number, 0.0, output)


def take(queue: FairQueue, output: int = 0) -> str:
    """Admit the next and charge it at once; its tenant."""
    expected = queue.peek()
    sequence = queue.pop()
    assert sequence is expected
    queue.charge(sequence, prompt_tokens=sequence.num_prompt, output_tokens=output)
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


def test_a_pause_saves_up_nothing() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.push(make_sequence(number, "busy"))
    for _ in range(40):
        take(queue)
    for number in range(100, 140):
        queue.push(make_sequence(number, "back"))
    turns = [take(queue) for _ in range(40)]
    assert turns.count("back") == 20


def test_who_comes_when_nobody_waits_starts_where_the_last_one_left() -> None:
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


def test_an_empty_queue_says_so() -> None:
    queue = FairQueue()
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(KeyError):
        queue.remove(make_sequence(0, "a"))


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(0, 3), st.integers(1, 9))))
def test_everyone_leaves_once_and_in_order_within_a_tenant(operations: list[tuple[str, int, int]]) -> None:
    queue, inside, popped = FairQueue(remembered=3), [], []
    for number, (operation, which, size) in enumerate(operations):
        if operation == "push":
            inside.append(make_sequence(number, "abcd"[which], size))
            queue.push(inside[-1])
        elif operation == "pop" and inside:
            popped.append(queue.pop())
            queue.charge(popped[-1], prompt_tokens=size)
            assert popped[-1] is next(s for s in inside if s.request.tenant == popped[-1].request.tenant)
            inside.remove(popped[-1])
        elif inside:
            queue.remove(inside.pop(which % len(inside)))
        assert len(queue) == len(inside)
        assert set(queue) == set(inside)
    while inside:
        inside.remove(queue.pop())
    assert queue.peek() is None


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(2, 4))
def test_tenants_who_always_wait_get_the_same_service_within_the_papers_bound(
    seed: int, max_running: int, tenants: int
) -> None:
    """Over any stretch of time, service differs by at most 2·max(w_p·L, w_o·M)."""
    chance = random.Random(seed)
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
    for _ in range(300):
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
