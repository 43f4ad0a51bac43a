"""Pressure: how the level follows the replicas' reports, and what an account may use at a level."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contracts.limiting import PressureReport, Window
from serve_app.contracts.limits import Contract
from serve_app.limiter.pressure import Controller, Tuning
from serve_app.limiter.shares import NoCapacity, OverShare, Shares

CONTRACT = Contract(rpm=1_000, tpm=600_000, concurrency=100, weight=100)
TUNING = Tuning()
START = 1_000.0


def report(age_s: float = 0.0, replica: str = "r", waiting: int | None = None, **more: Any) -> PressureReport:
    told: dict[str, Any] = {"kv_used": 0.5, "queued_prefill_tokens": 0, "running": 32, "tokens_done": 0} | more
    return PressureReport("b", replica, age_s, waiting=(age_s > 0) if waiting is None else waiting, **told)


class Backend:
    """Shares with a clock and replicas that report twice a second."""

    def __init__(self, shards: int = 1, tuning: Tuning = TUNING) -> None:
        self.now = START
        self.shares = Shares(tuning, CONTRACT, shards)
        self.done = 0

    def goes_on(self, seconds: float, age_s: float, per_s: int = 2_000, replicas: int = 1, **more: Any) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.done += per_s // 2
            for number in range(replicas):
                told = report(age_s, f"r{number}", tokens_done=self.done // replicas, **more)
                self.shares.report(told, self.now)

    @property
    def controller(self) -> Controller:
        self.rate()  # brings it up to now
        return self.shares.backends["b"].controller

    def rate(self, contract: Contract = CONTRACT) -> float:
        return self.shares.rate("b", contract, self.now)

    def check(self, account_id: str = "a", contract: Contract = CONTRACT) -> OverShare | NoCapacity | None:
        return self.shares.check_share("b", account_id, contract, self.now)

    def take(self, tokens: int, account_id: str = "a", contract: Contract = CONTRACT) -> Any:
        return self.shares.charge_share("b", account_id, contract, tokens, self.now)


def test_without_reports_nothing_is_restricted() -> None:
    backend = Backend()
    assert backend.rate() == 10_000
    assert backend.take(10**9) is None
    assert backend.check() is None
    assert backend.shares.pressed(CONTRACT, backend.now) == ()


def test_a_backend_without_waiting_requests_restricts_no_account() -> None:
    backend = Backend()
    backend.goes_on(600, age_s=0.0)
    backend.take(10**6)
    backend.goes_on(2, age_s=0.0)
    assert backend.rate() == 10_000
    assert backend.check() is None


def test_a_long_prompt_on_a_backend_that_was_never_busy_delays_no_other_request() -> None:
    # It has served one stream at a time, at 120 tokens a second, and computes prompts at 5,000.
    backend = Backend()
    backend.goes_on(300, age_s=0.0, per_s=120, running=1)
    backend.take(32_000)
    assert backend.check("another") is None
    left = 32_000
    while left > 0:
        backend.goes_on(0.5, age_s=0.0, per_s=5_000, queued_prefill_tokens=left, running=2)
        assert backend.check("another") is None
        left -= 2_500


def test_occasional_prompts_show_what_a_quiet_backend_can_do() -> None:
    backend = Backend()
    for _ in range(20):
        backend.goes_on(30, age_s=0.0, per_s=120, running=1)
        backend.goes_on(1, age_s=0.0, per_s=4_000, queued_prefill_tokens=2_000)
    backend.take(32_000)
    assert backend.check("another") is None
    assert backend.controller.capacity == pytest.approx(4_000, rel=0.05)


def test_the_capacity_of_a_backend_rises_with_its_throughput_and_falls_only_while_requests_wait() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=0.0, per_s=120)
    assert backend.controller.capacity == 0, "never busy: nothing is known"
    backend.goes_on(30, age_s=0.3, per_s=1_000)
    assert backend.controller.capacity == pytest.approx(1_000, rel=0.01)
    backend.goes_on(60, age_s=0.0, per_s=3_000)
    backend.goes_on(60, age_s=0.0, per_s=50)
    assert backend.controller.capacity == pytest.approx(3_000, rel=0.01)
    backend.goes_on(60, age_s=0.3, per_s=500)
    assert backend.controller.capacity == pytest.approx(500, rel=0.01)


def test_under_pressure_rates_are_in_proportion_to_the_weights() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    light, heavy = (Contract(1, 600_000, 1, weight) for weight in (200, 800))
    assert 0 < backend.rate(light) < backend.rate(heavy) < 10_000
    assert backend.rate(heavy) == pytest.approx(4 * backend.rate(light))


def test_no_account_gets_less_than_the_floor_of_its_contract() -> None:
    backend = Backend()
    backend.goes_on(600, age_s=30.0)
    assert backend.rate() == pytest.approx(TUNING.floor * 10_000)
    assert backend.rate(Contract(1, 600_000, 1, weight=1)) == pytest.approx(TUNING.floor * 10_000)


def test_within_a_minute_after_the_pressure_the_level_restricts_no_account() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=3.0)
    assert backend.rate() < 1_000
    backend.goes_on(60, age_s=0.0)
    assert backend.rate() == 10_000
    assert backend.controller.level == float("inf")


def test_one_slow_replica_of_several_throttles_no_account() -> None:
    backend = Backend()
    for _ in range(200):
        backend.now += 0.5
        for name, age_s in (("slow", 60.0), ("quick", 0.0), ("quicker", 0.0)):
            backend.shares.report(report(age_s, name), backend.now)
    assert backend.rate() == 10_000


def test_a_replica_that_falls_silent_is_forgotten() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    assert backend.rate() < 10_000
    for _ in range(120):
        backend.now += 0.5
        backend.shares.report(report(0.0, "new"), backend.now)
    assert len(backend.controller._replicas) == 1
    assert backend.rate() == 10_000


def test_silence_of_all_replicas_is_no_reason_to_restrict_for_long() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=3.0)
    backend.now += 1.0
    soon = backend.rate()
    backend.now += 120.0
    assert soon < 1_000
    assert backend.rate() == 10_000
    assert backend.check() is None


def test_a_full_kv_cache_with_requests_waiting_stops_the_rise() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    low = backend.rate()
    backend.goes_on(20, age_s=0.1, kv_used=1.0)
    kept = backend.rate()
    backend.goes_on(20, age_s=0.1)
    assert low <= kept < backend.rate()


def test_prompts_that_take_long_to_compute_are_pressure_too() -> None:
    backend = Backend()
    backend.goes_on(20, age_s=0.0, per_s=1_000)
    backend.goes_on(20, age_s=0.0, per_s=1_000, queued_prefill_tokens=9_000)
    assert backend.rate() < 1_000


def test_an_account_ahead_of_its_share_waits_until_it_has_drained_and_no_longer() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    backend.goes_on(2, age_s=TUNING.target_s)
    rate = backend.rate()
    backend.take(round(rate * 10))
    verdict = backend.check()
    assert isinstance(verdict, OverShare)
    assert verdict.limit == round(rate * 60)
    assert verdict.wait_s == pytest.approx(10 - TUNING.burst_s, rel=0.01)
    backend.goes_on(2.5, age_s=TUNING.target_s)
    assert isinstance(backend.check(), OverShare)
    backend.goes_on(2.0, age_s=TUNING.target_s)
    assert backend.check() is None


def test_one_request_of_any_size_fits_when_nothing_is_in_use() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=30.0)
    for _ in range(3):
        assert not isinstance(backend.check(), OverShare)
        backend.take(30_000)
        assert isinstance(backend.check(), OverShare)
        backend.goes_on(30_000 / backend.rate(), age_s=30.0)


def test_one_account_ahead_does_not_hold_up_another() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    backend.take(20_000, "flood")
    assert isinstance(backend.check("flood"), OverShare)
    assert backend.check("other") is None


def test_corrections_count_as_if_the_true_figure_had_been_known() -> None:
    exact, corrected = Backend(), Backend()
    for backend in (exact, corrected):
        backend.goes_on(6, age_s=3.0)
    exact.take(5_000)
    charge = corrected.take(9_000)
    charge.recharge(corrected.now, 2_000, CONTRACT)
    charge.recharge(corrected.now, 5_000, CONTRACT)
    assert exact.check() == corrected.check()


def test_an_undone_charge_counts_for_nothing() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    charge = backend.take(20_000)
    assert backend.check() is not None
    charge.recharge(backend.now, 0, CONTRACT)
    assert backend.check() is None


def test_a_charge_from_before_the_pressure_is_not_given_back_out_of_a_later_one() -> None:
    backend = Backend()
    backend.goes_on(6, age_s=3.0)
    before = backend.take(10**6)
    backend.goes_on(120, age_s=0.0)
    backend.goes_on(6, age_s=3.0)
    backend.take(10**6)
    before.recharge(backend.now, 0, CONTRACT)
    assert isinstance(backend.check(), OverShare)


def test_the_window_shows_the_effective_limit_and_what_fits_now() -> None:
    backend = Backend()
    contract = Window(600_000, 400_000, 20.0)

    def window() -> Window:
        return backend.shares.window("b", "a", CONTRACT, contract, backend.now)

    assert window() == contract
    backend.goes_on(6, age_s=3.0)
    rate = backend.rate()
    assert window() == Window(round(rate * 60), int(rate * TUNING.burst_s), 0.0)
    backend.take(int(rate * 60))
    assert window().remaining == 0
    assert window().reset_s == pytest.approx(60.0, rel=0.01)


def test_an_account_within_its_share_is_refused_only_when_the_wait_would_be_too_long() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=39.0)
    assert backend.check("new") is None
    backend.goes_on(1, age_s=41.0)
    verdict = backend.check("new")
    assert isinstance(verdict, NoCapacity)
    assert verdict.expected_s == 41.0
    assert verdict.wait_s == 1.0


def test_waiting_work_shows_the_wait_before_its_age_does() -> None:
    backend = Backend()
    backend.goes_on(60, age_s=1.0, per_s=1_000)
    backend.take(1_000)
    backend.goes_on(1, age_s=1.0, per_s=1_000, waiting=90)
    verdict = backend.check("new")
    assert isinstance(verdict, NoCapacity)
    assert verdict.expected_s == pytest.approx(90.0, rel=0.05)
    assert verdict.wait_s == pytest.approx(50.0, rel=0.1)


def test_a_flood_between_two_reports_is_counted_before_the_replicas_report_it() -> None:
    backend = Backend(shards=3)
    backend.goes_on(60, age_s=0.2, per_s=1_000, waiting=1)
    let_in = 0
    while backend.check(f"account-{let_in}") is None:
        backend.take(1_000, f"account-{let_in}")
        let_in += 1
    assert 10 <= let_in <= 14  # three shards let in 40 s of work together


def test_two_shards_with_the_same_reports_compute_the_same_level() -> None:
    one, two = (Controller(TUNING, CONTRACT, START) for _ in range(2))
    now = START
    for age_s in [0.0, 2.0, 9.0, 4.0, 0.3, 0.0, 1.0] * 20:
        now += 0.5
        for shard in (one, two):
            shard.report(report(age_s, waiting=3), now)
        assert one.level == two.level
        assert one.granted_until(now + 0.1) == two.granted_until(now + 0.1)


def test_a_shard_that_missed_reports_comes_back_to_the_others_level() -> None:
    one, two = (Controller(TUNING, CONTRACT, START) for _ in range(2))
    now = START
    apart = []
    for number in range(1_200):
        now += 0.5
        told = report((0.2, 1.4)[one.level > 2.0], waiting=3)
        one.report(told, now)
        if not 100 <= number < 120:
            two.report(told, now)
        apart.append(abs(one.level / two.level - 1.0) if one.restricts and two.restricts else 0.0)
    assert max(apart[100:130]) > 0.2
    assert max(apart[-50:]) < 0.05


told_anything = st.builds(
    PressureReport,
    backend=st.just("b"),
    replica=st.sampled_from(["r0", "r1", "r2"]),
    queue_age_s=st.floats(allow_nan=True, allow_infinity=True),
    kv_used=st.floats(allow_nan=True, allow_infinity=True),
    queued_prefill_tokens=st.integers(-10, 10**12),
    waiting=st.integers(-10, 10**6),
    running=st.integers(0, 10**4),
    tokens_done=st.integers(0, 10**15),
)
contracts = st.builds(Contract, st.just(1), st.integers(0, 10**9), st.just(1), weight=st.integers(1, 10_000))


@given(st.lists(st.tuples(told_anything, st.floats(0.0, 50.0)), max_size=60), contracts)
def test_with_any_reports_a_rate_lies_between_the_floor_and_the_contract(
    told: list[tuple[PressureReport, float]], contract: Contract
) -> None:
    shares = Shares(TUNING, CONTRACT)
    now = START
    for one, wait_s in told:
        now += wait_s
        shares.report(one, now)
        rate = shares.rate("b", contract, now)
        assert not isnan(rate)
        assert TUNING.floor * contract.tpm / 60 <= rate * (1 + 1e-9)
        assert rate <= contract.tpm / 60
        shares.charge_share("b", "a", contract, 5_000, now)
        verdict = shares.check_share("b", "a", contract, now)
        assert verdict is None or verdict.wait_s > 0
        window = shares.window("b", "a", contract, Window(contract.tpm, contract.tpm, 1.0), now)
        assert 0 <= window.remaining <= window.limit <= contract.tpm
        multiplier = shares.rate("b", CONTRACT, now) / 10_000
        assert TUNING.floor <= multiplier * (1 + 1e-9)
        assert multiplier <= 1


@given(
    st.lists(st.floats(0.0, 20.0), max_size=40),
    st.floats(0.0, 20.0),
    st.floats(0.0, 20.0),
    st.sampled_from(["queue_age_s", "queued_prefill_tokens"]),
)
def test_more_pressure_never_raises_the_level(history: list[float], less: float, more: float, what: str) -> None:
    less, more = sorted((less, more))
    levels = []
    for last in (less, more):
        controller = Controller(TUNING, CONTRACT, START)
        now = START
        for number, age_s in enumerate(history):
            now += 0.5
            controller.report(report(age_s, waiting=3, tokens_done=1_000 * number), now)
        told = {"queue_age_s": 0.1} | {what: last if what == "queue_age_s" else int(1_000 * last)}
        now += 0.5
        controller.report(report(told.pop("queue_age_s"), waiting=3, tokens_done=1_000 * len(history), **told), now)
        levels.append(controller.level)
    assert levels[1] <= levels[0]
