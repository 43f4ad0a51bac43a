"""Tests of admission's promises: the order of refusals, all or nothing, and exact holds."""

from __future__ import annotations

import pytest

from serve_app.contracts.limiting import (
    Grant,
    Identify,
    Identity,
    OpenHold,
    Recovering,
    Refusal,
    UnknownKey,
)
from serve_app.contracts.limits import RATES, Contract
from serve_app.limiter.pressure import Tuning
from tests.limiter.world import OUTPUT_PRICE, PROMPT_PRICE, World, account_snapshot, key_snapshot


def test_a_grant_holds_the_prompt_and_the_whole_output() -> None:
    world = World()
    grant = world.grant(prompt=100, output=50)
    assert grant.hold == 100 * PROMPT_PRICE + 50 * OUTPUT_PRICE == world.admission.status("a").held
    assert (grant.account_id, grant.key_id, grant.max_tokens, grant.tentative) == ("a", "k", 50, False)
    assert grant.tokens_charged == 150
    assert (grant.requests.limit, grant.requests.remaining) == (60, 59)
    assert (grant.tokens.limit, grant.tokens.remaining) == (60_000, 59_850)
    assert world.admission.status("a").open_requests == 1


def test_an_unknown_key_is_to_be_looked_up() -> None:
    world = World()
    assert world.ask(key_digest="other") == UnknownKey("r", "other")
    world.admission.apply(key_snapshot("other", "k2", "b", True, 1))
    assert world.ask(key_digest="other") == UnknownKey("r", "other"), "the key alone is not enough"
    world.admission.apply(account_snapshot("b", 1000, 1))
    assert world.grant(key_digest="other").account_id == "b"


def test_a_revoked_key_and_a_suspended_account_get_401() -> None:
    world = World()
    world.account(active=False)
    refusal = world.refusal()
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert "suspended" in refusal.message
    world.account(version=3)
    world.admission.apply(key_snapshot("d", "k", "a", False, 2))
    refusal = world.refusal()
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert "revoked" in refusal.message


def test_a_stale_key_or_account_written_back_changes_nothing() -> None:
    world = World()
    world.admission.apply(key_snapshot("d", "k", "a", False, 5))
    world.admission.apply(key_snapshot("d", "k", "a", True, 4))
    assert world.refusal().status == 401
    world = World()
    world.account(balance=0, version=9)
    world.account(balance=500, version=8)
    assert world.refusal().status == 402


def test_identify_returns_whose_key_it_is_and_consumes_nothing() -> None:
    world = World()
    assert world.admission.identify(Identify("d")) == Identity("a", "k")
    assert world.admission.identify(Identify("x")) == UnknownKey("", "x")
    world.account(active=False)
    answer = world.admission.identify(Identify("d"))
    assert isinstance(answer, Refusal)
    assert answer.status == 401


@pytest.mark.parametrize(
    ("setup", "status", "code"),
    [
        ({"balance": 0, "concurrency": 0, "rpm": 0, "tpm": 0}, 402, "insufficient_balance"),
        ({"balance": -5, "rpm": 0}, 402, "insufficient_balance"),
        ({"concurrency": 0, "rpm": 0, "tpm": 0}, 429, "concurrency"),
        ({"rpm": 0, "tpm": 0}, 429, "requests"),
        ({"tpm": 0}, 429, "tokens"),
    ],
)
def test_refusals_come_in_order(setup: dict[str, int], status: int, code: str) -> None:
    refusal = World(**setup).refusal()
    assert (refusal.status, refusal.code) == (status, code)
    if status == 429:
        assert refusal.retry_after_s is not None
        assert 0 < refusal.retry_after_s <= 60
        assert refusal.requests is not None
        assert refusal.tokens is not None


@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"rpm": 1}, {"tpm": 200}], ids=["concurrency", "requests", "tokens"]
)
def test_a_refused_request_consumes_nothing(limits: dict[str, int]) -> None:
    world = World(**limits)
    world.grant("first", 100, 100)
    before = world.everything()
    for n in range(20):
        assert world.refusal(f"r{n}").status == 429
    assert world.everything() == before


@pytest.mark.parametrize("of_key", [False, True], ids=["account", "key"])
@pytest.mark.parametrize("name", RATES)
def test_each_declared_rate_is_charged_checked_refused_and_given_back(name: str, of_key: bool) -> None:
    rate = RATES[name]
    limits = {name: 1 if rate.unit == "requests" else 150}
    world = World(**({} if of_key else limits))
    if of_key:
        world.key(**limits)
    world.grant("1", 100, 50)
    refusal = world.refusal("2", 100, 50)
    assert refusal.code == rate.unit
    whose = "the limit of this API key" if of_key else "the limit"
    assert refusal.message.startswith(f"{rate.unit.capitalize()} per {rate.per}: {whose} is {limits[name]}")
    window = refusal.requests if rate.unit == "requests" else refusal.tokens
    assert window is not None
    assert (window.limit, window.remaining, window.reset_s) == (limits[name], 0, pytest.approx(rate.window_s))
    world.end("1", refused=True)
    world.grant("2", 100, 50)


def test_requests_at_once_are_limited_and_a_release_frees_the_slot() -> None:
    world = World(concurrency=2)
    world.grant("1")
    world.grant("2")
    refusal = world.refusal("3")
    assert refusal.code == "concurrency"
    assert "the limit is 2 and 2 are in flight" in refusal.message
    world.end("1")
    world.grant("3")


def test_messages_name_the_limit_the_use_and_the_wait() -> None:
    world = World(rpm=2)
    world.grant("1")
    world.grant("2")
    refusal = world.refusal("3")
    assert refusal.message == "Requests per minute: the limit is 2 and 2 are used. Try again in 30 s."
    assert refusal.retry_after_s == pytest.approx(31.5, abs=1.5)
    world = World(tpm=300)
    world.grant("1", 100, 100)
    refusal = world.refusal("2", 100, 100)
    assert "the limit is 300, 200 are used and this request counts for 200" in refusal.message
    assert "Try again in 20 s" in refusal.message


def test_a_repeated_admit_returns_the_same_grant() -> None:
    world = World(concurrency=1)
    first = world.grant()
    assert world.grant() is first
    assert world.admission.status("a").held == first.hold
    adjusted = world.adjust(50)
    assert world.grant() is adjusted


def test_release_twice_is_harmless() -> None:
    world = World()
    world.grant("other")
    world.grant()
    world.end(prompt=100, output=10, balance=900_000, version=2)
    world.end(prompt=100, output=10, balance=900_000, version=2)
    assert world.admission.status("a").open_requests == 1


# Balance


def test_the_balance_caps_the_output() -> None:
    world = World(balance=100 * PROMPT_PRICE + 7 * OUTPUT_PRICE + 3)
    grant = world.grant(prompt=100, output=50)
    assert (grant.max_tokens, grant.tentative) == (7, False)
    assert grant.hold == 100 * PROMPT_PRICE + 7 * OUTPUT_PRICE


def test_concurrent_requests_cannot_overdraw() -> None:
    world = World(balance=1000)
    holds = [answer.hold for n in range(8) if isinstance(answer := world.ask(f"r{n}", 50, 60), Grant)]
    assert sum(holds) <= 1000
    assert world.refusal("last").status == 402


def test_402_distinguishes_no_balance_from_a_held_balance() -> None:
    empty = World(balance=0).refusal()
    assert "no balance left" in empty.message
    assert "Add funds" in empty.message
    world = World(balance=700)
    world.grant(prompt=100, output=100)
    held = world.refusal("2")
    assert "held by 1 request in flight" in held.message
    assert "0.0000007" in held.message
    assert "Wait" in held.message


def test_a_prompt_that_seems_too_expensive_is_decided_when_it_is_counted() -> None:
    world = World(balance=100)
    grant = world.grant(prompt=1000, output=20)
    assert grant.tentative
    assert grant.hold == 100
    adjusted = world.adjust(30)
    assert isinstance(adjusted, Grant)
    assert not adjusted.tentative
    assert adjusted.max_tokens == (100 - 30 * PROMPT_PRICE) // OUTPUT_PRICE
    assert world.admission.status("a").held == adjusted.hold == 30 * PROMPT_PRICE + adjusted.max_tokens * OUTPUT_PRICE


def test_a_402_at_the_count_undoes_the_admission() -> None:
    world = World(balance=100)
    before = world.windows()
    world.grant(prompt=40, output=20)
    refusal = world.adjust(60)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (402, "insufficient_balance")
    assert "60 tokens and 1 token of output cost 0.000000125" in refusal.message
    assert "0.0000001 of the balance of 0.0000001 is available" in refusal.message
    assert (world.admission.status("a").held, world.admission.status("a").open_requests) == (0, 0)
    assert world.windows() == before


def test_adjust_gives_the_output_back_that_a_high_estimate_had_taken() -> None:
    world = World(balance=100 * PROMPT_PRICE + 5 * OUTPUT_PRICE)
    assert world.grant(prompt=100, output=50).max_tokens == 5
    assert world.adjust(50).max_tokens == 25


def test_adjust_is_idempotent_and_corrects_the_token_rate() -> None:
    world = World()
    world.grant(prompt=100, output=10)
    adjusted = world.adjust(400)
    assert adjusted.tokens_charged == 410
    assert adjusted.tokens.remaining == 60_000 - 410
    assert world.adjust(400) == adjusted


def test_adjust_of_an_unknown_request_is_503() -> None:
    refusal = World().adjust(10, "nobody")
    assert (refusal.status, refusal.code) == (503, "overloaded")
    assert refusal.retry_after_s <= 60


def test_free_models_need_a_balance_but_hold_nothing() -> None:
    grant = World(balance=1).grant(prompt_price=0, output_price=0, output=4096)
    assert (grant.hold, grant.max_tokens) == (0, 4096)
    assert World(balance=0).refusal(prompt_price=0, output_price=0).status == 402


# Token rate


def test_the_token_rate_is_charged_at_once_so_that_concurrent_requests_cannot_pass_it_together() -> None:
    """In another service, five concurrent requests used 663 tokens of a limit of 100."""
    world = World(tpm=100)
    answers = [world.ask(f"r{n}", 30, 100) for n in range(5)]
    assert [isinstance(answer, Grant) for answer in answers] == [True, False, False, False, False]


def test_a_limit_smaller_than_the_usual_charge_still_lets_small_requests_run_one_after_another() -> None:
    """In another service, a default estimate of about 1000 tokens refused every request under a small limit."""
    world = World(tpm=100)
    for n in range(6):
        world.grant(f"r{n}", 10, 4096)
        world.end(f"r{n}", 10, 2)
    assert world.windows()[1] == 100 - 6 * 12


def test_a_request_larger_than_the_whole_limit_runs_alone_and_pays_with_waiting() -> None:
    world = World(tpm=1000)
    world.grant("small", 10, 1)
    refusal = world.refusal("large", 5000, 1)
    assert "more than the whole limit" in refusal.message
    world.now += 1
    world.grant("large", 5000, 1)
    world.end("large", 5000, 1)
    assert world.refusal("next", 1, 1).retry_after_s <= 60
    world.now += 4 * 60
    assert world.refusal("next", 1, 1).code == "tokens"
    world.now += 1
    world.grant("next", 1, 1)


def test_what_was_really_used_counts_in_the_end_even_into_debt() -> None:
    world = World(tpm=1000)
    world.grant(prompt=100, output=4096)
    world.end(prompt=100, output=3000)
    refusal = world.refusal("next", 1, 1)
    assert "3100 are used" in refusal.message


def test_the_charge_follows_what_the_account_produces() -> None:
    world = World(rpm=1000, tpm=10**7)
    assert world.grant("first", 0, 4096).tokens_charged == 256
    world.end("first", 0, 0)
    for n in range(40):
        world.grant(f"r{n}", 0, 4096)
        world.end(f"r{n}", 0, 20)
    assert world.grant("last", 0, 4096).tokens_charged in (20, 21)
    assert world.grant("small", 0, 5).tokens_charged == 5, "never more than the output that is possible"


def test_a_refused_release_gives_back_the_request_rate_too() -> None:
    world = World()
    before = world.windows()
    world.grant()
    world.end(refused=True)
    assert world.windows() == before
    world.grant()
    world.end(prompt=40)
    assert world.windows() == (before[0] - 1, before[1] - 40)


def test_a_request_that_ends_before_its_prompt_is_counted_keeps_the_estimate_in_its_rates() -> None:
    world = World()
    before = world.windows()
    world.grant(prompt=700)
    world.end()
    assert world.windows() == (before[0] - 1, before[1] - 700)


def test_a_release_that_keeps_its_rate_gives_back_the_money_and_the_output_alone() -> None:
    world = World()
    requests, tokens = world.windows()
    world.grant()
    world.end(prompt=700, refused=True, keeps_rate=True)
    assert world.windows() == (requests - 1, tokens - 700)
    status = world.admission.status("a")
    assert (status.held, status.open_requests) == (0, 0)


# Limits that change


def test_own_limits_override_the_default_and_fall_back_to_it() -> None:
    world = World(rpm=5)
    assert world.admission.status("a").contract == Contract(5, 60_000, 10)
    assert world.admission.status("nobody").contract == world.contract
    world.admission.reconfigure(Contract(100, 200, 300), Tuning())
    assert world.admission.status("a").contract == Contract(5, 200, 300)
    world.account()
    assert world.admission.status("a").contract == Contract(100, 200, 300)


def test_a_smaller_limit_applies_at_once_to_what_is_in_use() -> None:
    world = World(rpm=10)
    for n in range(5):
        world.grant(f"r{n}")
    world.account(rpm=2)
    assert world.grant("last").requests.remaining == 0


def test_the_wait_is_jittered_and_never_shorter_than_needed_nor_longer_than_a_minute() -> None:
    world = World(rpm=2)
    world.grant("1")
    world.grant("2")
    waits = {world.refusal(f"r{n}").retry_after_s for n in range(50)}
    assert len(waits) > 10
    assert all(30 <= wait <= 33 for wait in waits if wait is not None)
    world = World(tpm=10)
    world.grant("1", 1000, 1)
    assert all(50 <= (world.refusal(f"r{n}").retry_after_s or 0) <= 60 for n in range(50))


# Settled balances


def test_a_release_moves_the_balance_only_forward() -> None:
    world = World(balance=1000)
    world.grant("1", 10, 10)
    world.grant("2", 10, 10)
    world.end("2", 10, 10, balance=860, version=3)
    world.end("1", 10, 10, balance=930, version=2)
    assert world.admission._accounts["a"].free == 860


def test_a_late_release_still_brings_the_balance() -> None:
    world = World(balance=1000)
    world.grant("1", 10, 10)
    world.now += 11
    assert world.admission.expire() == ["1"]
    world.end("1", 10, 10, balance=930, version=2, account_id="a")
    assert world.admission._accounts["a"].free == 930


def test_a_look_up_older_than_a_known_settlement_is_refused() -> None:
    world = World()
    world.end("gone", 10, 10, balance=5, version=7, account_id="b")
    world.admission.apply(key_snapshot("e", "k2", "b", True, 1))
    world.admission.apply(account_snapshot("b", 1000, 6))
    assert world.ask(key_digest="e") == UnknownKey("r", "e")
    world.admission.apply(account_snapshot("b", 5, 7))
    assert world.grant(prompt=1, output=1, key_digest="e").hold == 5


def test_a_hold_announced_during_recovery_counts_before_the_balance_is_known() -> None:
    world = World(recovery_s=2.0)
    assert world.ask() == Recovering("r", 2.0)
    assert world.adjust(10, "old") == Recovering("old", 2.0)
    world.admission.announce(OpenHold("old", "b", "k2", 700, 300, PROMPT_PRICE, OUTPUT_PRICE, 100), "g")
    assert (world.admission.status("b").held, world.admission.status("b").open_requests) == (700, 1)
    assert isinstance(world.adjust(50, "old"), UnknownKey)
    world.now += 2
    world.admission.apply(key_snapshot("e", "k2", "b", True, 1))
    assert isinstance(world.ask(key_digest="e"), UnknownKey)
    world.admission.apply(account_snapshot("b", 700, 1))
    assert world.adjust(50, "old").max_tokens == 100
    assert world.admission.status("b").held == 50 * PROMPT_PRICE + 100 * OUTPUT_PRICE
    assert world.grant("new", key_digest="e").hold == 700 - 600
