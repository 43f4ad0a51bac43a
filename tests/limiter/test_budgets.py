"""A key's budget for a day or a month of UTC can't be overspent, for any number of requests and any end."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.limiting import Grant, Recovering, Refusal
from serve_app.contracts.periods import CLOCK_SKEW_S
from tests.limiter.world import MIDNIGHT, OUTPUT_PRICE, PROMPT_PRICE, World

TODAY, TOMORROW = "2026-11-21", "2026-11-22"
COST = 100 * PROMPT_PRICE + 100 * OUTPUT_PRICE  # of a request as `World.grant` asks for it


def with_budget(budget: int, **more: Any) -> World:
    world = World()
    world.key(budget=budget, **({"budget_period": "day", "spent_period": TODAY} | more))
    return world


def spend(world: World, request_id: str, key_spent: int, version: int, period: str = TODAY, **more: Any) -> None:
    """The request ends, settled."""
    world.end(request_id, 100, 10, balance=10**6, version=version, key_spent=key_spent, key_period=period, **more)


# What is left


def test_what_is_left_of_the_budget_caps_the_output() -> None:
    world = with_budget(100 * PROMPT_PRICE + 7 * OUTPUT_PRICE + 3)
    grant = world.grant(prompt=100, output=50)
    assert (grant.max_tokens, grant.tentative) == (7, False)


def test_open_requests_count_against_the_budget_so_that_any_number_at_once_stays_within_it() -> None:
    world = with_budget(1000, spent=100)
    holds = [answer.hold for n in range(8) if isinstance(answer := world.ask(f"r{n}", 50, 60), Grant)]
    assert sum(holds) <= 900
    refusal = world.refusal("last")
    assert (refusal.status, refusal.code) == (402, "budget_exceeded")
    assert "The rest of this key's budget of 0.000001 for the day 2026-11-21 is held" in refusal.message


def test_the_refusal_for_a_spent_budget_names_it_and_when_it_renews() -> None:
    world = with_budget(1000, spent=1000)
    before = world.everything()
    refusal = world.refusal()
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (402, "budget_exceeded", None)
    assert "has spent its budget of 0.000001 for the day 2026-11-21" in refusal.message
    assert "renews at 2026-11-22T00:00:00Z" in refusal.message
    assert world.everything() == before
    world.key(version=3, budget=1000, budget_period="month", spent=1200, spent_period="2026-11")
    refusal = world.refusal()
    assert "for the month 2026-11" in refusal.message
    assert "renews at 2026-12-01T00:00:00Z" in refusal.message


def test_the_budget_of_a_key_does_not_limit_another_key_of_the_account() -> None:
    world = with_budget(1000, spent=1000)
    world.key(digest="d2", key_id="k2")
    world.grant(key_digest="d2")
    assert world.refusal("2").code == "budget_exceeded"


def test_a_prompt_that_seems_too_expensive_for_the_budget_is_decided_when_it_is_counted() -> None:
    world = with_budget(100)
    grant = world.grant(prompt=1000, output=20)
    assert (grant.tentative, grant.hold) == (True, 100)
    adjusted = world.adjust(30)
    assert adjusted.max_tokens == (100 - 30 * PROMPT_PRICE) // OUTPUT_PRICE
    world.end("r", refused=True)
    world.grant("2", 1000, 20)
    before = world.admission._accounts["a"].keys["k"].held
    refusal = world.adjust(60, "2")
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (402, "budget_exceeded")
    assert "60 tokens and 1 token of output cost 0.000000125, and 0.0000001 is available" in refusal.message
    assert (before, world.admission._accounts["a"].keys["k"].held) == (100, 0)


def test_the_tighter_of_balance_and_budget_decides() -> None:
    world = with_budget(600)
    world.account(balance=500)
    assert world.grant("1", 100, 100).hold == 500
    assert world.refusal("2").code == "insufficient_balance"
    world = with_budget(500)
    world.account(balance=600)
    assert world.grant("1", 100, 100).hold == 500
    assert world.refusal("2").code == "budget_exceeded"
    assert world.adjust(400, "1").code == "budget_exceeded"


def test_a_budget_that_is_raised_or_lifted_counts_at_once() -> None:
    world = with_budget(1000, spent=1000)
    assert world.refusal().status == 402
    world.key(version=3, budget=1001, budget_period="day", spent=1000, spent_period=TODAY)
    assert world.grant().hold == 1
    world.key(version=4)
    assert world.grant("2").hold == COST


# What is spent


def test_a_settlement_frees_the_hold_and_counts_what_was_spent_in_one_step() -> None:
    world = with_budget(COST + 50)
    world.grant("1")
    spend(world, "1", key_spent=250, version=2)
    assert world.admission._accounts["a"].keys["k"].left(world.at) == COST + 50 - 250


def test_settlements_that_arrive_out_of_order_and_older_states_give_nothing_back() -> None:
    world = with_budget(2 * COST)
    world.grant("1")
    world.grant("2")
    spend(world, "2", key_spent=700, version=9)
    spend(world, "1", key_spent=350, version=8)
    key = world.admission._accounts["a"].keys["k"]
    assert key.left(world.at) == 2 * COST - 700
    world.key(version=3, budget=2 * COST, budget_period="day", spent=350, spent_period=TODAY, spent_version=8)
    assert key.left(world.at) == 2 * COST - 700, "its terms are newer, what it says is spent is older"
    world.key(version=4, budget=2 * COST, budget_period="day", spent=900, spent_period=TODAY, spent_version=10)
    assert key.left(world.at) == 2 * COST - 900


def test_a_late_release_still_brings_what_was_spent_and_an_older_look_up_does_not_undo_it() -> None:
    world = World()
    world.restart()
    spend(world, "gone", key_spent=900, version=7, account_id="a", key_id="k")
    world.account(version=7)
    world.key(budget=1000, budget_period="day", spent=100, spent_period=TODAY, spent_version=6)
    assert world.grant(prompt=0).hold == 100


def test_after_a_restart_announced_requests_count_against_the_budget() -> None:
    world = with_budget(COST + 10)
    grant = world.grant("1")
    world.restart(recovery_s=2.0)
    world.announce(grant)
    world.account()
    world.key(budget=COST + 10, budget_period="day", spent_period=TODAY)
    world.wait(2)
    assert world.grant("2", 0, 100).hold == 10
    spend(world, "1", key_spent=5, version=3)
    assert world.grant("3", 0, 1000).hold == COST + 10 - 5 - 10


def test_a_lease_that_runs_out_frees_the_budget() -> None:
    world = with_budget(COST)
    world.grant("1")
    world.wait(11)
    world.admission.expire()
    assert world.grant("2").hold == COST


# Midnight


def test_at_midnight_the_budget_is_whole_again() -> None:
    world = with_budget(COST, spent=COST)
    world.wait(MIDNIGHT - world.at)
    assert world.refusal().code == "budget_exceeded", "clocks may differ: the old day still counts for a second"
    world.wait(CLOCK_SKEW_S)
    assert world.grant().hold == COST


def test_a_request_that_runs_past_midnight_is_taken_from_the_new_days_budget() -> None:
    """The request is settled in the new day, so only the rest of that budget is left for others."""
    world = with_budget(COST + 20)
    world.wait(MIDNIGHT - world.at - 1)
    world.grant("old")
    world.wait(5)
    assert world.grant("new", 0, 100).hold == 20
    spend(world, "old", key_spent=COST, version=2, period=TOMORROW)
    assert world.admission._accounts["a"].keys["k"].left(world.at) == 0


def test_a_request_settled_in_the_old_day_frees_its_part_of_the_new_one() -> None:
    world = with_budget(COST)
    world.wait(MIDNIGHT - world.at - 1)
    world.grant("old")
    world.wait(5)
    assert world.refusal("new").code == "budget_exceeded"
    spend(world, "old", key_spent=0, version=2, period=TOMORROW)
    assert world.grant("new").hold == COST


def test_a_spend_that_the_ledger_reports_for_a_new_day_is_used() -> None:
    world = with_budget(COST)
    world.wait(MIDNIGHT - world.at - 0.5)
    world.grant("1")
    spend(world, "1", key_spent=COST - 30, version=2, period=TOMORROW)
    assert world.refusal("2").code == "budget_exceeded", "which day it was charged to is not known"
    world.wait(10)
    assert world.admission._accounts["a"].keys["k"].left(world.at) == 30


def test_a_ledger_whose_new_day_has_begun_does_not_renew_the_old_one_early() -> None:
    world = with_budget(COST, spent=COST - 1)
    world.wait(MIDNIGHT - world.at - 0.5)
    world.grant("1", 0, 1, output_price=1)
    spend(world, "1", key_spent=0, version=2, period=TOMORROW)
    assert world.refusal("2").code == "budget_exceeded", "a gateway may still be in the old day"
    world.wait(2)
    assert world.admission._accounts["a"].keys["k"].left(world.at) == COST


def test_where_the_old_days_end_is_not_known_a_request_waits_for_the_new_day() -> None:
    """The key is looked up when the ledger's new day has begun and the gateways' day may not have ended."""
    world = World()
    world.wait(MIDNIGHT - world.at + 0.25)
    world.key(budget=COST, budget_period="day", spent=0, spent_period=TOMORROW)
    answer = world.ask()
    assert isinstance(answer, Recovering)
    assert answer.retry_in_s == pytest.approx(CLOCK_SKEW_S - 0.25)
    world.wait(answer.retry_in_s)
    assert world.grant().hold == COST


def test_a_ledger_whose_clock_is_hours_ahead_stops_no_request() -> None:
    world = World()
    world.key(budget=COST, budget_period="day", spent=COST - 30, spent_period=TOMORROW)
    assert world.grant(prompt=0).hold == 30


def test_a_wall_clock_that_is_set_back_finds_the_old_day_as_it_was_left() -> None:
    world = with_budget(COST, spent=COST)
    world.at = MIDNIGHT + 10
    world.grant("1")
    spend(world, "1", key_spent=40, version=2, period=TOMORROW)
    world.at = MIDNIGHT - 10
    assert world.refusal("2").code == "budget_exceeded"
    world.at = MIDNIGHT + 10
    assert world.grant("2", 0, 1000).hold == COST - 40


def test_a_budget_that_becomes_monthly_counts_what_the_ledger_reports_for_the_month() -> None:
    world = with_budget(1000, spent=10)
    world.key(version=3, budget=1000, budget_period="month", spent=900, spent_period="2026-11")
    assert world.grant("1", 0, 1000).hold == 100
    world.end("1", refused=True)
    world.key(version=4, budget=1000, budget_period="day", spent=10, spent_period=TODAY)
    assert world.grant("1", 0, 1000).hold == 990


def test_where_the_old_days_end_is_not_known_an_open_request_waits_for_the_new_day_to_be_counted() -> None:
    world = World()
    grant = world.grant("1")
    world.wait(MIDNIGHT - world.at + 0.25)
    world.restart()
    world.announce(grant)
    world.account()
    world.key(budget=10 * COST, budget_period="day", spent=0, spent_period=TOMORROW)
    assert world.adjust(120, "1") == Recovering("1", pytest.approx(CLOCK_SKEW_S - 0.25))
    world.wait(CLOCK_SKEW_S)
    assert world.adjust(120, "1").max_tokens == 100


def test_what_ended_before_a_restarted_limiter_knew_the_key_counts_in_the_day_that_ends() -> None:
    world = World()
    grants = [world.grant(name) for name in ("1", "2")]
    world.wait(MIDNIGHT - world.at + 0.25)
    world.restart()
    for grant in grants:
        world.announce(grant)
    ends = {"account_id": "a", "key_id": "k", "balance": 10**6}
    world.end("1", 100, 100, **ends, version=5, key_spent=COST, key_period=TODAY)
    world.end("2", 100, 100, **ends, version=6, key_spent=0, key_period=TOMORROW)
    world.account(version=6)
    world.key(budget=2 * COST, budget_period="day", spent=0, spent_period=TOMORROW, spent_version=6)
    assert isinstance(world.ask("3"), Recovering), "the second one may have been charged to either day"
    world.wait(CLOCK_SKEW_S)
    world.grant("3")
