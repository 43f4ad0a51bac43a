"""Tests that only one request with the same idempotency key is open at a time."""

from __future__ import annotations

from tests.limiter.world import World, account_snapshot, key_snapshot


def test_a_second_request_with_the_key_gets_409_and_consumes_nothing() -> None:
    world = World()
    world.grant("1", idempotency_key="i")
    before = world.everything()
    refusal = world.refusal("2", idempotency_key="i")
    assert (refusal.status, refusal.code) == (409, "idempotency_in_progress")
    assert refusal.retry_after_s is not None
    assert 0 < refusal.retry_after_s <= 60
    assert world.everything() == before
    world.grant("2", idempotency_key="other")
    world.grant("3")


def test_a_repeated_admit_of_the_same_request_is_not_409() -> None:
    world = World()
    first = world.grant("1", idempotency_key="i")
    assert world.grant("1", idempotency_key="i") is first


def test_the_idempotency_key_is_free_after_any_end_of_the_request() -> None:
    world = World(balance=2_000)
    world.grant("1", idempotency_key="i")
    world.end("1", 100, 100)
    world.grant("2", idempotency_key="i")
    world.end("2", refused=True)
    world.grant("3", 10, 10, idempotency_key="i")
    assert world.adjust(5000, "3").status == 402
    world.grant("4", idempotency_key="i")
    world.wait(11)
    assert world.admission.expire() == ["4"]
    world.grant("5", idempotency_key="i")


def test_a_409_comes_before_402_and_429_and_after_401_and_422() -> None:
    world = World(balance=700, concurrency=1, rpm=1)
    world.grant("1", idempotency_key="i")
    assert world.refusal("2", idempotency_key="i").status == 409
    assert world.refusal("2", idempotency_key="j").status == 402
    world.key(models=())
    assert world.refusal("2", idempotency_key="i").status == 422
    world.key(version=3, active=False)
    assert world.refusal("2", idempotency_key="i").status == 401


def test_idempotency_keys_belong_to_the_account_and_its_api_keys_share_them() -> None:
    world = World()
    world.admission.apply(account_snapshot("b", 10**6, 1))
    world.admission.apply(key_snapshot("e", "k9", "b", True, 1))
    world.key(digest="d2", key_id="k2")
    world.grant("1", idempotency_key="i")
    assert world.refusal("2", idempotency_key="i", key_digest="d2").status == 409
    world.grant("3", idempotency_key="i", key_digest="e")


def test_a_restarted_limiter_learns_the_idempotency_keys_of_open_requests() -> None:
    world = World()
    grant = world.grant("1", idempotency_key="i")
    world.restart()
    world.announce(grant, idempotency_key="i")
    world.account()
    world.key()
    assert world.refusal("2", idempotency_key="i").status == 409
    world.end("1", 1, 1)
    world.grant("2", idempotency_key="i")


def test_a_lost_request_that_is_announced_beside_its_repetition_does_not_free_its_key() -> None:
    """Its lease had expired, the repeated request was admitted, and then its gateway announces it again."""
    world = World()
    grant = world.grant("1", idempotency_key="i")
    world.wait(11)
    world.admission.expire()
    world.grant("2", idempotency_key="i")
    world.announce(grant, idempotency_key="i")
    world.end("1", 1, 1)
    assert world.refusal("3", idempotency_key="i").status == 409
    world.end("2", 1, 1)
    world.grant("3", idempotency_key="i")
