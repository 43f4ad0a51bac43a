"""The simulated cluster: every request ends once, every second of a replica is paid, and a seed decides everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.cluster import Arrival, Cluster, Fleet
from bench.simulation.outcome import Outcome
from bench.simulation.policies import Fixed, Rule
from bench.simulation.replica import Device
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.scaling.signals import Signals

DEVICE = Device(slots=8, max_waiting=24, kv_tokens=30_000, prefill_per_s=4_000.0, step_s=0.05, row_s=0.002)
FLEET = Fleet(device=DEVICE, most=4, start_s=60.0, price_per_hour=3.6)


def steady(per_s: float, seconds: float, since_s: float = 0.0, prompt: int = 800, output: int = 100) -> list[Arrival]:
    return [
        Arrival(since_s + number / per_s, f"a{number % 5}", prompt, output) for number in range(int(per_s * seconds))
    ]


def run(arrivals: list[Arrival], policy: Rule | Fixed, seconds: float, fleet: Fleet = FLEET, **more: int) -> Outcome:
    return Cluster(fleet, policy, {one.account_id for one in arrivals}, **more).run(arrivals, seconds)


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0, 600),
        account_id=st.sampled_from("abc"),
        prompt=st.integers(1, 4_000),
        output=st.integers(1, 600),
    ),
    max_size=150,
)


@settings(max_examples=8)
@given(arrivals, st.integers(0, 3))
def test_every_request_ends_exactly_once(arrivals: list[Arrival], least: int) -> None:
    assert_each_ends_once(arrivals, least)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=80)
@given(arrivals, st.integers(0, 3))
def test_every_request_of_many_days_ends_exactly_once(arrivals: list[Arrival], least: int) -> None:
    assert_each_ends_once(arrivals, least)


def assert_each_ends_once(arrivals: list[Arrival], least: int) -> None:
    arrivals.sort(key=lambda one: one.at)
    fleet = Fleet(device=DEVICE, least=least, most=3, start_s=40.0)
    policy = Rule(ScalingSettings(zero_after_s=60, down_after_s=30))
    outcome = Cluster(fleet, policy, "abc", replicas=least).run(arrivals, 3_000)
    assert outcome.done + outcome.given_up + outcome.late == outcome.requests == len(arrivals)
    assert outcome.unfinished == 0
    assert len(outcome.queued_s) == outcome.done
    assert min(outcome.queued_s, default=0.0) >= 0.0
    assert all(first > waited for first, waited in zip(outcome.first_s, outcome.queued_s, strict=True))


def test_the_same_seed_gives_the_same_day_and_another_seed_another_one() -> None:
    arrivals = steady(2.0, 200)
    first, again, other = (run(arrivals, Rule(), 500, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.cost != other.cost


def test_a_replica_is_paid_from_the_decision_to_start_it_until_its_last_reply() -> None:
    class Once:
        def wanted(self, signals: Signals) -> int:
            return 2 if 100 <= signals.now < 300 else 1

    outcome = Cluster(FLEET, Once(), "a").run([Arrival(299.0, "a", 800, 400)] * 4, 1_000)
    assert outcome.changes == 2
    # One for the whole time, one from second 100 to 300 and until two replies of some 20 seconds end.
    seconds = outcome.cost / 3.6 * 3600.0
    assert 1_000 + 200 <= seconds <= 1_000 + 200 + 30
    assert outcome.done == 4
    assert max(outcome.paid) == 2


def test_no_reply_is_lost_when_replicas_go() -> None:
    arrivals = steady(3.0, 600) + steady(0.2, 600, since_s=600.0)
    outcome = run(arrivals, Rule(ScalingSettings(down_after_s=60)), 2_000)
    assert max(outcome.replicas) > min(outcome.replicas[600:])
    assert outcome.done + outcome.given_up == outcome.requests
    assert outcome.late == 0


def test_from_no_replica_a_request_waits_for_the_first_one_and_is_served() -> None:
    fleet = Fleet(device=DEVICE, least=0, most=2, start_s=60.0)
    outcome = Cluster(fleet, Rule(), "a", replicas=0).run([Arrival(500.0, "a", 100, 10)], 1_800)
    assert outcome.done == 1
    assert 48 <= outcome.queued_s[0] <= 76
    assert outcome.replicas[-1] == 0
    slow = Fleet(device=DEVICE, least=0, most=2, start_s=300.0)
    late = Cluster(slow, Rule(), "a", replicas=0).run([Arrival(500.0, "a", 100, 10)], 1_800)
    assert (late.done, late.late) == (0, 1)


def test_the_rule_serves_a_surge_that_one_replica_refuses() -> None:
    arrivals = steady(0.5, 300) + steady(3.0, 400, since_s=300.0)
    one, ruled = run(arrivals, Fixed(1), 720), run(arrivals, Rule(), 720)
    assert one.refused > 500
    assert ruled.refused < one.refused / 3
    assert max(ruled.replicas) > 1


def test_limits_and_prices_count_as_in_the_service() -> None:
    price = Price(270, 70, 1_100)
    arrivals = [Arrival(float(n), "a", 1_000, 50, 1_024, 400, price) for n in range(100)]
    cluster = Cluster(FLEET, Fixed(4), "a", replicas=4, contract=Contract(rpm=30, tpm=10**6, concurrency=8), retries=0)
    outcome = cluster.run(arrivals, 400)
    assert 30 <= outcome.done < 100
    assert outcome.given_up == 100 - outcome.done
    assert outcome.revenue == outcome.done * (600 * 270 + 400 * 70 + 50 * 1_100)
    assert outcome.tokens == (outcome.done * 1_000, outcome.done * 50)
