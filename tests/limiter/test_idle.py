"""Idle state is forgotten: memory follows the keys in use, not all keys ever seen."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from serve_app.contracts.limiting import UnknownKey
from tests.limiter.world import World, account_snapshot, key_snapshot

IDLE_S = 600.0


def forget(world: World, most: int = 10**6) -> int:
    return world.admission.forget_idle(IDLE_S, most)


def test_a_key_that_is_idle_for_long_enough_is_forgotten_and_then_its_account() -> None:
    world = World()
    world.wait(IDLE_S - 1)
    assert forget(world) == 0
    world.wait(1)
    assert forget(world) == 1
    assert world.sizes() == (1, 0)
    assert world.ask() == UnknownKey("r", "d")
    world.wait(IDLE_S)
    assert forget(world) == 1
    assert world.sizes() == (0, 0)
    assert forget(world) == 0
    world.account()
    world.key()
    world.grant()


def test_open_requests_keep_what_they_count_for() -> None:
    world = World()
    world.grant("r")
    for _ in range(3):
        world.wait(IDLE_S)
        assert forget(world) == 0
    assert world.admission.status("a").held > 0
    world.end("r", 1, 1)
    world.wait(IDLE_S - 1)
    assert forget(world) == 0
    world.wait(1)
    assert forget(world) == 1


def test_use_keeps_a_key_and_its_account_however_long_ago_they_were_looked_up() -> None:
    world = World()
    for n in range(5):
        world.wait(IDLE_S / 2)
        world.grant(f"r{n}")
        world.end(f"r{n}", 1, 1)
        assert forget(world) == 0


def test_rates_that_have_not_drained_are_kept_until_they_have() -> None:
    world = World()
    world.key(tpm=10)
    world.grant("r", 1000, 1)
    world.end("r", 1000, 0)  # 100 minutes of the key's limit, a second of its account's
    for _ in range(9):
        world.wait(IDLE_S)
        assert forget(world) == 0
    world.wait(IDLE_S + 1)
    assert forget(world) == 1
    world = World(tpm=10)
    world.grant("r", 1000, 1)
    world.end("r", 1000, 0)
    world.wait(IDLE_S)
    assert forget(world) == 1
    for _ in range(8):
        world.wait(IDLE_S)
        forget(world)
    assert world.sizes() == (1, 0), "an account's debt outlives its keys"
    world.wait(2 * IDLE_S)
    forget(world)
    assert world.sizes() == (0, 0)


def test_a_change_is_remembered_so_that_an_older_look_up_is_recognised() -> None:
    """If a revoked key were forgotten at once, a look-up result still on its way would make it valid again."""
    world = World()
    world.wait(IDLE_S - 1)
    world.key(version=5, active=False)
    world.wait(1)
    assert forget(world) == 0
    world.key(version=4, active=True)
    assert world.refusal().status == 401
    world.wait(IDLE_S - 2)
    assert forget(world) == 0


def test_an_account_without_keys_is_remembered_from_its_last_settlement_on() -> None:
    world = World()
    world.end("gone", 1, 1, balance=5, version=7, account_id="b")
    world.wait(IDLE_S - 1)
    world.end("gone", 1, 1, balance=4, version=8, account_id="b")
    world.wait(1)
    forget(world)
    world.admission.apply(account_snapshot("b", 5, 7))
    world.admission.apply(key_snapshot("e", "kb", "b", True, 1))
    assert isinstance(world.ask(key_digest="e"), UnknownKey)


def test_revoked_keys_of_a_busy_account_do_not_pile_up() -> None:
    world = World()
    for n in range(200):
        world.key(version=10 + n, digest=f"x{n}", key_id=f"kx{n}", active=False)
        world.grant(f"r{n}")
        world.end(f"r{n}", 1, 1)
        world.wait(60)
        forget(world)
    assert world.sizes() == (1, 10)
    assert len(world.admission._accounts["a"].keys) == 10


def test_a_round_forgets_at_most_so_many_and_the_longest_idle_first() -> None:
    world = World()
    for n in range(100):
        world.admission.apply(account_snapshot(f"b{n}", 1, 1))
        world.admission.apply(key_snapshot(f"e{n}", f"k{n}", f"b{n}", True, 1))
        world.wait(1)
    world.wait(IDLE_S)
    assert forget(world, most=30) == 30
    assert world.sizes() == (101, 71)
    assert not world.admission.knows("e28")
    assert world.admission.knows("e29")


def test_a_round_looks_only_at_what_is_idle() -> None:
    """Thousands of keys in use cost a round no time."""
    world = World(concurrency=10**6)
    for n in range(2000):
        world.admission.apply(account_snapshot(f"b{n}", 10**6, 1))
        world.admission.apply(key_snapshot(f"e{n}", f"k{n}", f"b{n}", True, 1))
        world.grant(f"r{n}", key_digest=f"e{n}")
    assert list(world.admission._registry._idle) == [world.admission._keys["d"]]


@pytest.mark.slow
def test_memory_follows_what_is_in_use() -> None:
    world = World()

    def visitors(first: int, count: int) -> None:
        for n in range(first, first + count):
            world.admission.apply(account_snapshot(f"b{n}", 10**6, 1))
            world.admission.apply(key_snapshot(f"e{n}", f"k{n}", f"b{n}", True, 1, rpm=10))
            world.grant(f"r{n}", key_digest=f"e{n}", idempotency_key=f"i{n}")
            world.end(f"r{n}", 1, 1)
            world.wait(1)
            forget(world, most=10)

    tracemalloc.start()
    try:
        visitors(0, 1300)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        visitors(1300, 1300)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    accounts, keys = world.sizes()
    assert accounts <= 2 * IDLE_S + 2
    assert keys <= IDLE_S + 2
    assert after < 1.1 * before
