"""Tests that demand refused by pressure counts each request once, and no account for more than it may use."""

from __future__ import annotations

from serve_app.contracts.limiting import PressureReport, Refusal
from serve_app.limiter.refused_demand import SAME_S, WINDOW_S, RefusedDemand
from tests.limiter.test_pressure_admission import BACKEND, Limiter

MAX_RATE = 1_000.0  # tokens per second


def test_the_rate_is_of_the_last_seconds() -> None:
    demand = RefusedDemand()
    for second in range(5):
        demand.add("a", (100, second), 500, MAX_RATE, float(second))
    assert demand.rate(4.0) == 5 * 500 / WINDOW_S
    assert demand.rate(4.0 + WINDOW_S) == 500 / WINDOW_S
    assert demand.rate(5.0 + WINDOW_S) == 0.0


def test_a_request_that_is_tried_again_counts_once() -> None:
    demand = RefusedDemand()
    for second in range(20):
        demand.add("a", (100, 1024), 500, MAX_RATE, float(second))
    assert demand.rate(WINDOW_S) == 0.0  # it counted at second 0, and no more
    demand.add("b", (100, 1024), 500, MAX_RATE, 20.0)
    assert demand.rate(20.0) == 500 / WINDOW_S
    demand.add("a", (100, 1024), 500, MAX_RATE, 20.0 + SAME_S)
    assert demand.rate(20.0 + SAME_S) == 500 / WINDOW_S


def test_an_account_counts_for_no_more_than_its_contract_however_much_it_asks_for() -> None:
    demand = RefusedDemand()
    for number in range(1_000):
        demand.add("a", (100, number), 500, MAX_RATE, 1.0)
    assert demand.rate(1.0) == MAX_RATE
    demand.add("b", (100, 1), 500, MAX_RATE, 1.0)
    assert demand.rate(1.0) == MAX_RATE + 500 / WINDOW_S


def test_replicas_hear_what_their_backend_refused_and_nothing_of_what_a_contract_refused() -> None:
    limiter = Limiter()
    for _ in range(12):
        limiter.now += 0.5
        heard = limiter.admission.report(PressureReport(BACKEND, "r", 3.0, 0.5, 0, 5, 32))
    assert heard.refused_tokens_per_s == 0.0
    refusals = [answer for _ in range(200) if isinstance(answer := limiter.ask(), Refusal)]
    assert refusals
    limiter.now += 0.5
    heard = limiter.admission.report(PressureReport(BACKEND, "r", 3.0, 0.5, 0, 5, 32))
    assert heard.refused_tokens_per_s > 0.0
    other = limiter.admission.report(PressureReport("other", "r", 0.0, 0.5, 0, 0, 1))
    assert other.refused_tokens_per_s == 0.0
