"""A key that is moved to another secret is known by both of its digests, and by no other."""

from __future__ import annotations

from serve_app.contracts.limiting import Grant, Refusal, UnknownKey
from tests.limiter.world import World

IDLE_S = 600.0


def is_known(world: World, digest: str) -> bool:
    world.asked = getattr(world, "asked", 0) + 1  # type: ignore[attr-defined]
    return isinstance(world.ask(f"{digest}-{world.asked}", 1, 1, key_digest=digest), Grant)  # type: ignore[attr-defined]


def test_a_moved_key_is_known_by_both_digests_and_is_one_key() -> None:
    world = World()
    world.key(moved_digest="d2")
    world.grant("r1")
    world.grant("r2", key_digest="d2")
    assert world.sizes()[0] == 1
    assert len(world.admission._accounts["a"].keys) == 1
    assert world.admission._accounts["a"].keys["k"].open == 2


def test_requests_that_are_open_while_the_key_is_moved_keep_their_holds_and_its_limits() -> None:
    world = World()
    world.key(concurrency=2)
    world.grant("r1")
    held = world.admission.status("a").held
    world.key(version=3, moved_digest="d2", concurrency=2)
    assert world.admission.status("a").held == held
    world.grant("r2", key_digest="d2")
    refused = world.refusal("r3", key_digest="d2")
    assert refused.code == "concurrency"
    world.end("r1", 1, 1)
    world.grant("r3", key_digest="d2")


def test_an_older_snapshot_takes_no_digest_away() -> None:
    world = World()
    world.key(version=3, moved_digest="d2")
    world.key(version=2)
    assert is_known(world, "d")
    assert is_known(world, "d2")


def test_after_a_second_move_the_first_digest_is_not_known_any_more() -> None:
    world = World()
    world.key(version=2, moved_digest="d2")
    world.key(version=3, digest="d2", moved_digest="d3")
    assert isinstance(world.ask("r", key_digest="d"), UnknownKey)
    assert is_known(world, "d2")
    assert is_known(world, "d3")


def test_a_revoked_key_is_refused_by_both_digests() -> None:
    world = World()
    world.key(version=2, moved_digest="d2")
    world.key(version=3, moved_digest="d2", active=False)
    for digest in ("d", "d2"):
        answer = world.ask("r", key_digest=digest)
        assert isinstance(answer, Refusal)
        assert answer.status == 401


def test_an_idle_key_is_forgotten_by_both_digests() -> None:
    world = World()
    world.key(moved_digest="d2")
    world.wait(IDLE_S)
    assert world.admission.forget_idle(IDLE_S, 10) == 1
    assert world.sizes() == (1, 0)
    for digest in ("d", "d2"):
        assert isinstance(world.ask("r", key_digest=digest), UnknownKey)
