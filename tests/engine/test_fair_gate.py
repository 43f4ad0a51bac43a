"""Tests of which requests an engine with its own scheduler gets, and when."""

from __future__ import annotations

import itertools

import pytest

from serve_app.contracts.generation import SamplingParams
from serve_app.engine.errors import QueueFull
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.fair_gate import FairGate, Place
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.seen_prefixes import BLOCK, SeenPrefixes

STEP = 100  # tokens
NEW = itertools.count(1000)  # tokens that no other prompt has


def gate(max_running: int = 4, max_waiting: int = 50, spare: int = 1) -> FairGate:
    return FairGate(
        FairQueue(),
        SeenPrefixes(100_000),
        max_running=max_running,
        max_waiting=max_waiting,
        spare=spare,
        step_tokens=STEP,
    )


def add(gate: FairGate, tenant: str, prompt: int = 10, now: float = 0.0, shared: tuple[int, ...] = ()) -> Place:
    """Queues a prompt of new tokens, `prompt` of them, behind the `shared` ones."""
    tokens = shared + tuple(next(NEW) for _ in range(prompt))
    return gate.add(GenerationRequest(str(tokens[-1]), tokens, SamplingParams(max_tokens=5), tenant), now)


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


def test_four_steps_of_prompts_are_in_the_engine_behind_the_first() -> None:
    long = gate(max_running=20)
    for _ in range(10):
        add(long, "a", prompt=90)
    first = long.release()
    assert len(first) == 6  # five of them are the first 450 tokens that are not below 400
    assert long.release() == []
    long.started(first[0], 0)
    assert len(long.release()) == 1


def test_behind_a_long_prompt_the_next_one_is_in_the_engine_already() -> None:
    long = gate()
    for _ in range(3):
        add(long, "a", prompt=900)
    assert len(long.release()) == 2
    assert long.release() == []


def test_tokens_that_an_earlier_prompt_had_do_not_count() -> None:
    agents = gate(max_running=20)
    shared = tuple(range(5 * STEP // BLOCK * BLOCK))
    places = [add(agents, "a", prompt=20, shared=shared) for _ in range(12)]
    assert [place.prompt_due for place in places] == [len(shared) + 20] + [20] * 11
    assert agents.release() == places


def test_tokens_of_another_tenants_prompt_count() -> None:
    agents = gate(max_running=20)
    shared = tuple(range(5 * STEP))
    places = [add(agents, tenant, prompt=20, shared=shared) for tenant in ("a", "b")]
    assert [place.prompt_due for place in places] == [len(shared) + 20] * 2


def test_another_tenants_prompt_does_not_wait_for_a_long_one() -> None:
    long = gate()
    add(long, "a", prompt=900)
    add(long, "a", prompt=900)
    long.release()
    add(long, "b")
    assert [place.tenant for place in long.release()] == ["b"]


def test_several_short_prompts_of_a_tenant_do_not_wait_for_a_long_one() -> None:
    long = gate(max_running=20)
    for _ in range(3):
        add(long, "a", prompt=900)
    long.release()
    for _ in range(12):
        add(long, "b", prompt=10)
    assert [place.tenant for place in long.release()] == ["b"] * 10  # one step


def test_a_tenant_without_room_does_not_hold_up_the_others() -> None:
    """ "b" is served a little more than "a", whose next prompt has no room."""
    long = gate(max_running=20)
    for _ in range(3):
        add(long, "a", prompt=900)
    long.release()
    first = add(long, "b", prompt=10)
    long.release()
    long.produced(first, 1000)
    add(long, "b", prompt=10)
    assert [place.tenant for place in long.release()] == ["b"]


def test_prompts_of_many_tenants_leave_room_for_one_that_is_new() -> None:
    """Eight tenants whose prompts never end still let the ninth in when room becomes free."""
    many = gate(max_running=100)
    tenants = [f"t{number}" for number in range(8)]
    for tenant in tenants * 10:
        add(many, tenant, prompt=45)
    inside = many.release()
    add(many, "new", prompt=45)
    for _ in range(20):
        if new := [place for place in inside if place.tenant == "new"]:
            break
        many.started(inside.pop(0), 0)
        inside += many.release()
    assert new


def test_a_tenants_first_prompt_precedes_the_later_ones_of_a_busy_tenant() -> None:
    long = gate()
    for _ in range(2):
        add(long, "a", prompt=900)
    _, second = long.release()
    add(long, "b")
    [light] = long.release()
    assert light.priority < second.priority


def test_a_busy_tenants_prompt_is_not_overtaken_without_end() -> None:
    long = gate(max_running=1000)
    for _ in range(2):
        add(long, "a", prompt=900)
    _, second = long.release()
    overtaken = 0
    for number in range(1000):
        place = add(long, f"light {number}", prompt=50)
        assert long.release() == [place]
        overtaken += 50 * (place.priority < second.priority)
        long.started(place, 0)
        long.leave(place)
    assert 0 < overtaken <= 8 * 1800


def test_prompts_are_charged_when_they_are_released() -> None:
    """Two tenants share the engine's room from the first moment."""
    fair = gate(max_running=20)
    for tenant in ("a", "b"):
        for _ in range(10):
            add(fair, tenant, prompt=90)
    assert [place.tenant for place in fair.release()] == ["a", "b"] * 3


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
