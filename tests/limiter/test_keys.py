"""A key's own limits apply on top of its account's, and a refusal by them consumes nothing either."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.limiting import Grant, Identify, Identity, OpenHold, Refusal, Release, UnknownKey
from tests.limiter.world import NOON, OUTPUT_PRICE, PROMPT_PRICE, World, account_snapshot, key_snapshot

# Who may use a key


def test_an_expired_key_gets_401_from_its_second_on() -> None:
    world = World()
    world.key(expires_at=NOON + 60)
    world.wait(59.5)
    world.grant("before")
    world.wait(0.5)
    refusal = world.refusal("after")
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert "has expired, at 2026-11-21T12:01:00Z" in refusal.message
    answer = world.admission.identify(Identify("d"))
    assert isinstance(answer, Refusal)
    assert answer.status == 401
    world.end("before", 100, 100)
    assert world.admission.status("a").open_requests == 0, "what was let in before ends as ever"


def test_an_expiry_that_is_moved_or_taken_away_counts_at_once() -> None:
    world = World()
    world.key(expires_at=NOON)
    assert world.refusal().status == 401
    world.key(version=3, expires_at=NOON + 1)
    world.grant("1")
    world.key(version=4)
    world.wait(10)
    assert world.admission.identify(Identify("d")) == Identity("a", "k")


def test_a_model_that_is_not_on_the_list_gets_422_which_names_the_list() -> None:
    world = World()
    world.key(models=("svc-coder", "svc-tiny"))
    refusal = world.refusal(model="svc-chat")
    assert (refusal.status, refusal.code) == (422, "model_not_found")
    assert "'svc-chat'" in refusal.message
    assert "svc-coder, svc-tiny" in refusal.message
    world.grant(model="svc-coder")
    world.key(version=3, models=())
    assert "no model at all" in world.refusal("2", model="svc-coder").message
    world.key(version=4)
    world.grant("3")


# Order


BLOCKED: dict[str, Any] = {"models": (), "budget": 0, "budget_period": "day", "concurrency": 0, "rpm": 0, "tpm": 0}


@pytest.mark.parametrize(
    ("lifted", "status", "code"),
    [
        ((), 422, "model_not_found"),
        (("models",), 402, "budget_exceeded"),
        (("models", "budget"), 429, "concurrency"),
        (("models", "budget", "concurrency"), 429, "requests"),
        (("models", "budget", "concurrency", "rpm"), 429, "tokens"),
    ],
)
def test_refusals_of_a_key_come_in_order_and_change_nothing(lifted: tuple[str, ...], status: int, code: str) -> None:
    world = World()
    world.key(**{name: value for name, value in BLOCKED.items() if name not in lifted})
    before = world.everything()
    refusal = world.refusal()
    assert (refusal.status, refusal.code) == (status, code)
    assert world.everything() == before
    assert (refusal.requests is None) == (refusal.tokens is None) == (status != 429)


def test_revoked_comes_before_expired_and_both_before_anything_else() -> None:
    world = World(balance=0)
    world.key(active=False, expires_at=NOON, models=())
    assert "revoked" in world.refusal().message
    world.key(version=3, expires_at=NOON, models=())
    assert "expired" in world.refusal().message
    world.key(version=4, models=())
    assert world.refusal().status == 422
    world.key(version=5, budget=0, budget_period="day")
    assert world.refusal().code == "insufficient_balance", "the account's money comes before the key's"


# Rates and concurrency


@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"rpm": 1}, {"tpm": 200}], ids=["concurrency", "requests", "tokens"]
)
def test_a_request_refused_by_the_keys_limit_consumes_nothing_of_key_and_account(limits: dict[str, int]) -> None:
    """In another service, requests refused for concurrency consumed the request rate."""
    world = World()
    world.key(**limits)
    world.grant("first", 100, 100)
    before = world.everything()
    for n in range(20):
        refusal = world.refusal(f"r{n}")
        assert refusal.status == 429
        assert "this API key" in refusal.message
    assert world.everything() == before


@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"rpm": 1}, {"tpm": 200}], ids=["concurrency", "requests", "tokens"]
)
def test_a_request_refused_by_the_accounts_limit_consumes_nothing_of_the_key(limits: dict[str, int]) -> None:
    world = World(**limits)
    world.key(rpm=50, tpm=5000, concurrency=5)
    world.grant("first", 100, 100)
    before = world.everything()
    for n in range(20):
        refusal = world.refusal(f"r{n}")
        assert refusal.status == 429
        assert "API key" not in refusal.message
    assert world.everything() == before


def test_what_a_key_may_not_have_another_key_of_the_account_may() -> None:
    world = World()
    world.key(concurrency=1)
    world.key(digest="d2", key_id="k2")
    world.grant("1")
    refusal = world.refusal("2")
    assert refusal.code == "concurrency"
    assert "limit of this API key is 1 and 1 are in flight" in refusal.message
    world.grant("2", key_digest="d2")
    world.end("1", 100, 100)
    world.grant("3")


def test_the_headers_show_the_tighter_of_account_and_key() -> None:
    world = World(rpm=60, tpm=60_000)
    world.key(rpm=3, tpm=100_000)
    grant = world.grant("1", 100, 100)
    assert (grant.requests.limit, grant.requests.remaining) == (3, 2)
    assert (grant.tokens.limit, grant.tokens.remaining) == (60_000, 59_800)
    world.key(version=3, tpm=500)
    grant = world.grant("2", 100, 100)
    assert (grant.requests.limit, grant.requests.remaining) == (60, 58)
    assert grant.tokens.limit == 500
    refusal = world.refusal("3", 400, 100)
    assert refusal.tokens is not None
    assert refusal.tokens.limit == 500


def test_of_two_limits_that_refuse_the_longer_wait_is_reported() -> None:
    world = World(rpm=2)
    world.key(rpm=1)
    world.grant("1")
    refusal = world.refusal("2")
    assert "limit of this API key is 1 and 1 are used. Try again in 60 s" in refusal.message
    world = World(rpm=2)
    world.key(rpm=10)
    world.grant("1")
    world.grant("2")
    refusal = world.refusal("3")
    assert "the limit is 2 and 2 are used. Try again in 30 s" in refusal.message


def test_concurrent_requests_of_a_key_cannot_pass_its_token_limit_together() -> None:
    """In another service, five concurrent requests used 663 tokens of a limit of 100."""
    world = World()
    world.key(tpm=100)
    answers = [world.ask(f"r{n}", 30, 100) for n in range(5)]
    assert [isinstance(answer, Grant) for answer in answers] == [True, False, False, False, False]


def test_a_small_limit_of_a_key_lets_small_requests_run_one_after_another() -> None:
    """Also beside another key of the account, whose replies are long."""
    world = World()
    world.key(digest="d2", key_id="k2")
    for n in range(10):
        world.grant(f"long{n}", 10, 4096, key_digest="d2")
        world.end(f"long{n}", 10, 4000)
    world.wait(60)
    world.key(tpm=100)
    for n in range(6):
        world.grant(f"r{n}", 10, 4096)
        world.end(f"r{n}", 10, 2)
    assert world.grant("last", 1, 1).tokens.remaining == 100 - 6 * 12 - 2


def test_what_was_really_used_counts_for_the_key_too() -> None:
    world = World()
    world.key(tpm=1000)
    world.grant(prompt=100, output=4096)
    world.end(prompt=100, output=3000)
    assert "limit of this API key is 1000, 3100 are used" in world.refusal("next", 1, 1).message


def test_a_refusal_after_admission_gives_the_keys_rates_and_slot_back() -> None:
    world = World()
    world.key(rpm=5, tpm=5000, concurrency=1, budget=10**6, budget_period="day")
    before = world.everything()
    world.grant(prompt=500, output=200)
    world.adjust(600)
    world.end(refused=True)
    after = world.everything()
    assert after[1:] == before[1:]
    key = world.admission._accounts["a"].keys["k"]
    room = {(bucket.name, bucket.of_key): bucket.state(world.now)[0] for bucket in (*key.requests, *key.tokens)}
    expected = {("rpm", False): 60, ("rpm", True): 5, ("tpm", False): 60_000, ("tpm", True): 5000}
    assert room.items() >= expected.items()


def test_an_undone_request_gives_back_what_it_was_charged_though_the_limit_has_changed() -> None:
    world = World(rpm=60)
    world.grant()
    world.account(rpm=1)
    world.end(refused=True)
    bucket = world.admission._accounts["a"].requests[0]
    assert bucket.used(world.now) == pytest.approx(0, abs=1e-6)
    world = World(rpm=2)
    world.grant()
    world.account(rpm=600)
    world.end(refused=True)
    assert world.grant("next").requests.remaining == 599


def test_a_changed_limit_of_a_key_keeps_what_is_in_use() -> None:
    world = World()
    world.key(rpm=10)
    for n in range(5):
        world.grant(f"r{n}")
    world.key(version=3, rpm=2)
    assert world.grant("last").requests.remaining == 0
    world.key(version=4)
    assert world.grant("free").requests.limit == 60


def test_a_token_limit_that_is_set_while_requests_run_counts_them() -> None:
    world = World()
    world.grant("1", 100, 100)
    world.key(tpm=1000)
    assert world.grant("2", 100, 100).tokens.remaining == 600
    world.end("1", 100, 400)
    assert world.grant("3", 1, 1).tokens.remaining == 1000 - 500 - 200 - 2


def test_a_stale_key_written_back_restores_no_limit() -> None:
    """In another service, a stale key object overwrote an update."""
    world = World()
    world.key(version=5, models=("svc-coder",), concurrency=1)
    world.key(version=4)
    assert world.refusal().status == 422
    world.key(version=5)
    assert world.refusal().status == 422


# Restart


def test_a_restarted_limiter_knows_the_keys_running_requests_before_it_knows_the_key() -> None:
    world = World()
    world.key(concurrency=2, tpm=1000)
    grants = [world.grant(f"r{n}", 100, 100) for n in range(2)]
    world.restart()
    for grant in grants:
        world.announce(grant)
    assert world.admission.knows("d") is False
    world.account()
    world.key(concurrency=2, tpm=1000)
    assert world.refusal("new").code == "concurrency"
    world.end("r0", 100, 50)
    assert world.grant("new", 100, 100).tokens.remaining == 1000 - 150 - 200 - 200
    for request_id in ("r1", "new"):
        world.end(request_id, 100, 100)
    account = world.admission._accounts["a"]
    assert (account.held, account.keys["k"].held, account.keys["k"].open) == (0, 0, 0)


@pytest.mark.parametrize("first", ["account", "key"])
def test_after_a_restart_a_reply_is_shortened_only_by_what_key_and_account_really_have_left(first: str) -> None:
    world = World()
    grant = world.grant(prompt=100, output=100)
    world.restart()
    world.announce(grant)
    assert world.adjust(120) == UnknownKey("r", "d")
    getattr(world, first)()
    assert not world.admission.knows("d")
    assert world.adjust(120) == UnknownKey("r", "d")
    world.account()
    world.key()
    assert world.admission.knows("d")
    assert world.adjust(120).max_tokens == 100
    world.key(version=3, budget=grant.hold, budget_period="day")
    assert world.adjust(120).max_tokens == 92


def test_a_key_that_is_revoked_while_the_account_is_unknown_is_still_looked_up() -> None:
    world = World()
    grant = world.grant(prompt=100, output=100)
    world.restart()
    world.announce(grant)
    world.key(active=False)
    assert not world.admission.knows("d"), "its request waits for the account"
    world.account()
    assert world.adjust(120).max_tokens == 100
    assert world.refusal("next").status == 401


def test_keys_of_two_accounts_with_the_same_id_are_separate() -> None:
    world = World()
    world.admission.apply(account_snapshot("b", 5000, 1))
    world.admission.apply(key_snapshot("e", "k", "b", True, 1, concurrency=1))
    world.admission.announce(OpenHold("x", "b", "k", 10, 10, PROMPT_PRICE, OUTPUT_PRICE, 1), "g")
    assert world.refusal("y", key_digest="e").code == "concurrency"
    world.grant("z")
    world.admission.release(Release("x", 1, 1))
    world.grant("y", key_digest="e")


def test_a_charge_that_has_drained_is_not_given_back_at_the_end() -> None:
    world = World()
    world.key(tpm=1000)
    world.grant("1", 900, 100)
    world.wait(60)
    world.grant("2", 900, 100)
    world.end("1", 0, 0)
    assert world.refusal("3", 100, 1).code == "tokens", "it would open a second burst on top of what time has restored"
