"""Tests of which requests an engine with its own scheduler gets, and when."""

from __future__ import annotations

import pytest

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.errors import QueueFull
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.fair_gate import FairGate, Place
from serve_app.engine.scheduling.fair_queue import FairQueue

STEP = 100  # tokens


def gate(max_running: int = 4, max_waiting: int = 50, spare: int = 1) -> FairGate:
    return FairGate(FairQueue(), max_running=max_running, max_waiting=max_waiting, spare=spare, step_tokens=STEP)


def add(gate: FairGate, tenant: str, prompt: int = 10, now: float = 0.0) -> Place:
    request = GenerationRequest(f"{tenant} {prompt} {now}", (1,) * prompt, SamplingParams(max_tokens=5), tenant)
    return gate.add(request, now)


def begin(gate: FairGate) -> list[str]:
    """The tenants of those that are released; all of them get their first token at once."""
    released = gate.release()
    for place in released:
        gate.started(place, 0)
    return [place.tenant for place in released]


def test_no_more_run_than_the_engine_has_slots() -> None:
    full = gate()
    places = [add(full, "a") for _ in range(6)]
    assert begin(full) == ["a"] * 4
    assert (full.running, full.waiting) == (4, 2)
    full.leave(places[0])
    assert begin(full) == ["a"]


def test_a_tenant_without_a_slot_gets_a_spare_one_and_the_others_do_not() -> None:
    held = gate()
    for _ in range(9):
        add(held, "a")
    begin(held)
    add(held, "b")
    add(held, "b")
    assert begin(held) == ["b"]
    assert begin(held) == []
    assert held.running == 5


def test_prompts_of_two_steps_are_in_the_engine_at_a_time() -> None:
    long = gate(max_running=10)
    for _ in range(4):
        add(long, "a", prompt=90)
    first = long.release()
    assert len(first) == 2
    assert long.release() == []
    long.started(first[0], 0)
    assert len(long.release()) == 1


def test_a_prompt_longer_than_two_steps_goes_in_alone() -> None:
    long = gate()
    add(long, "a", prompt=900)
    add(long, "a", prompt=900)
    assert len(long.release()) == 1
    assert long.release() == []


def test_another_tenants_prompt_does_not_wait_for_a_long_one() -> None:
    long = gate()
    add(long, "a", prompt=900)
    add(long, "a", prompt=900)
    long.release()
    add(long, "b")
    assert [place.tenant for place in long.release()] == ["b"]


def test_turns_follow_the_service_that_tenants_received() -> None:
    fair = gate(max_running=1, spare=0)
    first = add(fair, "a")
    assert begin(fair) == ["a"]
    for _ in range(3):
        add(fair, "a")
    other = add(fair, "b")
    fair.produced(first, 20)
    fair.leave(first)
    assert begin(fair) == ["b"]
    fair.leave(other)
    assert begin(fair) == ["a"]


def test_cached_tokens_are_no_service() -> None:
    fair = gate(max_running=1, spare=0)
    for tenant, cached in (("a", 90), ("b", 0)):
        place = add(fair, tenant, prompt=90)
        fair.release()
        fair.started(place, cached)
        fair.leave(place)
    held = add(fair, "c")
    fair.release()
    add(fair, "b")
    add(fair, "a")
    fair.leave(held)
    assert begin(fair) == ["a"]


def test_a_full_queue_refuses_but_not_a_tenant_below_its_share() -> None:
    small = gate(max_running=1, max_waiting=4, spare=0)
    for _ in range(5):
        add(small, "a")
    with pytest.raises(QueueFull):
        add(small, "a")
    add(small, "b")


def test_what_is_given_up_frees_its_place_where_it_is() -> None:
    some = gate(max_running=1, spare=0)
    runs, waits = add(some, "a", now=1.0), add(some, "a", now=2.0)
    some.release()
    assert some.oldest_wait_s(5.0) == 3.0
    some.leave(waits)
    assert (some.running, some.waiting, some.oldest_wait_s(5.0)) == (1, 0, 0.0)
    some.leave(runs)
    assert (some.running, some.queued_prefill_tokens()) == (0, 0)


def test_prompts_in_the_queue_and_in_the_engine_count_as_due_until_their_first_token() -> None:
    some = gate(max_running=1, spare=0)
    first = add(some, "a", prompt=30)
    add(some, "b", prompt=40)
    some.release()
    assert some.queued_prefill_tokens() == 70
    some.started(first, 10)
    assert some.queued_prefill_tokens() == 40
