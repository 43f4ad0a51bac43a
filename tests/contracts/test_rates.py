"""The rate bucket: what it promises, checked against exact arithmetic and against the `limits` package."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from serve_app.contracts.rates import WINDOW_S, Bucket, Rates

START = 1_000_000.0


def ask(bucket: Bucket, now: float, units: float) -> bool:
    if bucket.wait_s(now, units):
        return False
    bucket.charge(now, units)
    return True


def remaining(bucket: Bucket, now: float) -> int:
    return bucket.state(now)[0]


def test_a_full_bucket_grants_exactly_one_minutes_worth_at_once() -> None:
    bucket = Bucket(7)
    assert [ask(bucket, START, 1) for _ in range(8)] == [True] * 7 + [False]


def test_a_longer_window_drains_as_much_more_slowly() -> None:
    bucket = Bucket(24, window_s=86_400.0)
    assert [ask(bucket, START, 1) for _ in range(25)] == [True] * 24 + [False]
    assert bucket.wait_s(START, 1) == pytest.approx(3600.0)
    assert (remaining(bucket, START + 7200.0), bucket.used(START)) == (2, pytest.approx(24))
    assert bucket.reset_s(START) == pytest.approx(86_400.0)


@pytest.mark.parametrize("limit", [1, 3, 7, 60, 1000, 10**6, 10**7])
def test_remaining_is_exact_after_every_grant(limit: int) -> None:
    bucket = Bucket(limit)
    for used in range(min(limit, 50)):
        assert remaining(bucket, START) == limit - used
        assert ask(bucket, START, 1)
    assert remaining(bucket, START) == limit - min(limit, 50)


def test_after_the_returned_wait_it_grants_and_not_much_before() -> None:
    bucket = Bucket(60)
    ask(bucket, START, 60)
    wait = bucket.wait_s(START, 5)
    assert wait == pytest.approx(5.0)
    assert not ask(bucket, START + wait - 0.01, 5)
    assert ask(bucket, START + wait, 5)


def test_reset_is_the_time_until_nothing_is_in_use() -> None:
    bucket = Bucket(60)
    assert bucket.reset_s(START) == 0.0
    ask(bucket, START, 30)
    assert bucket.reset_s(START) == pytest.approx(30.0)
    assert bucket.reset_s(START + 100) == 0.0


def test_debt_blocks_until_it_has_drained() -> None:
    bucket = Bucket(60)
    ask(bucket, START, 60)
    bucket.charge(START, 30)
    assert remaining(bucket, START) == 0
    assert bucket.used(START) == pytest.approx(90)
    assert bucket.wait_s(START, 1) == pytest.approx(31.0)


def test_a_refund_right_after_the_charge_restores_the_bucket() -> None:
    bucket = Bucket(60)
    ask(bucket, START, 20)
    before = bucket.tat
    cost_s, drained_at = bucket.charge(START, 40)
    bucket.refund(START, cost_s, drained_at)
    assert bucket.tat == pytest.approx(before)


def test_what_has_drained_is_not_refunded() -> None:
    bucket = Bucket(60)
    _, drained_at = bucket.charge(START, 60)
    later = START + 60
    assert ask(bucket, later, 60)
    bucket.refund(later, bucket.cost_s(60), drained_at)
    assert remaining(bucket, later) == 0, "a refund of a minute ago would have opened a second burst"


def test_a_cost_above_the_limit_is_granted_only_when_nothing_is_in_use_and_is_paid_in_full() -> None:
    bucket = Bucket(60)
    ask(bucket, START, 1)
    assert not ask(bucket, START, 100)
    assert ask(bucket, START + 1, 100)
    assert bucket.reset_s(START + 1) == pytest.approx(100)


def test_a_changed_limit_keeps_the_share_in_use() -> None:
    bucket = Bucket(100)
    ask(bucket, START, 50)
    bucket.limit = 10
    assert remaining(bucket, START) == 5
    bucket.limit = 1000
    assert remaining(bucket, START) == 500


def test_a_limit_of_zero_grants_nothing_and_survives_corrections() -> None:
    bucket = Bucket(0)
    assert not ask(bucket, START, 1)
    assert bucket.wait_s(START, 1) == float("inf")
    bucket.charge(START, 5)
    assert (remaining(bucket, START), bucket.used(START)) == (0, 0)
    bucket.limit = 10
    assert ask(bucket, START, 10)


steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), min_size=1, max_size=60)


@given(limit=st.integers(40, 10_000), steps=steps)
def test_in_no_interval_is_more_granted_than_rate_times_time_plus_burst(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(limit), START
    granted: list[tuple[float, int]] = []
    for gap, units in steps:
        now += gap
        if ask(bucket, now, units):
            granted.append((now, units))
    for i, (begin, _) in enumerate(granted):
        total = 0
        for end, units in granted[i:]:
            total += units
            assert total <= limit + limit * (end - begin) / WINDOW_S + limit * 1e-5


@given(
    limit=st.integers(40, 5_000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60),
    data=st.data(),
)
def test_refunds_never_open_more_than_that(
    limit: int, steps: list[tuple[float, int, int]], data: st.DataObject
) -> None:
    """Counts each charge net of its refund, at the time of the charge."""
    bucket, now = Bucket(limit), START
    net: list[list[float]] = []
    open_charges: list[tuple[int, int, float, int]] = []
    for gap, units, back in steps:
        now += gap
        if ask(bucket, now, units):
            open_charges.append((len(net), units, bucket.tat, min(back, units)))
            net.append([now, units])
        if open_charges and data.draw(st.booleans()):
            at, _, drained_at, back = open_charges.pop(data.draw(st.integers(0, len(open_charges) - 1)))
            bucket.refund(now, bucket.cost_s(back), drained_at)
            net[at][1] -= back
    for i, (begin, _) in enumerate(net):
        total = 0.0
        for end, units in net[i:]:
            total += units
            assert total <= limit + limit * (end - begin) / WINDOW_S + limit * 1e-5


@given(limit=st.integers(1, 200), steps=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 50)), max_size=60))
def test_it_decides_like_exact_arithmetic(limit: int, steps: list[tuple[int, int]]) -> None:
    """Against fractions. Times are hundredths of a second, so that the slack for rounding has no effect."""
    bucket, tat, now = Bucket(limit), Fraction(0), Fraction(0)
    for gap, units in steps:
        now += Fraction(gap, 100)
        cost = Fraction(60 * units, limit)
        exact = max(tat, now) + cost - now <= 60 or (units > limit and tat <= now)
        assert ask(bucket, float(now), units) == exact
        if exact:
            tat = max(tat, now) + cost
        room = 60 - max(Fraction(0), tat - now)
        assert remaining(bucket, float(now)) == max(0, int(room * limit / 60))


def test_within_one_minute_it_grants_as_much_as_a_moving_window() -> None:
    """From a fresh start, at one instant, both are a plain counter: `limits` is the oracle."""
    oracle = MovingWindowRateLimiter(MemoryStorage())
    item = RateLimitItemPerMinute(25)
    bucket = Bucket(25)
    for units in (3, 7, 1, 9, 6, 5, 2, 4):
        assert ask(bucket, START, units) == oracle.hit(item, "account", cost=units)
        assert remaining(bucket, START) == oracle.get_window_stats(item, "account").remaining


def test_refused_events_leave_nothing_and_push_nobody_out() -> None:
    rates = Rates(lambda: 0.0, most=10)
    assert rates.count(("victim", 1)) == 0
    for number in range(100):
        assert rates.count(("victim", 1), (f"other {number}", 1)) > 0
    assert len(rates) == 1


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    rates = Rates(lambda: 0.0, most=10)
    for number in range(100):
        rates.count((f"name {number}", 1))
        assert len(rates) <= 10
    assert rates.count(("name 90", 1)) > 0
    assert rates.count(("name 89", 1)) == 0
