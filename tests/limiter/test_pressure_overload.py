"""Pressure: what accounts get of an overloaded backend, in simulated hours of the service's own admission."""

from __future__ import annotations

import pytest

from bench.pressure import overload
from bench.pressure.clients import Shape, Stream, Workers
from bench.pressure.record import FULL, LATE, SHARE, WAIT
from bench.pressure.world import World
from bench.simulation.replica import Device
from serve_app.contracts.limits import Contract
from serve_app.limiter.pressure import Tuning

SHAPE = Shape()
CONTRACT = Contract(rpm=100_000, tpm=3_000_000, concurrency=10_000, weight=100)
REPLICAS = 2
LONG = (pytest.mark.slow, pytest.mark.long)


@pytest.fixture(scope="module")
def capacity() -> float:
    """Tokens per second of all replicas."""
    return REPLICAS * overload.capacity(Device(), SHAPE)


@pytest.fixture(scope="module")
def mean() -> float:
    """Tokens of a request."""
    return SHAPE.mean(World(0))


def world_of(seed: int = 1, shards: int = 1, window_s: float = 10.0) -> World:
    return World(seed, replicas=REPLICAS, shards=shards, contract=CONTRACT, window_s=window_s)


def weighing(weight: int) -> Contract:
    return Contract(CONTRACT.rpm, CONTRACT.tpm, CONTRACT.concurrency, weight)


@pytest.mark.parametrize(
    ("seed", "shards", "replicas", "seconds"),
    [(1, 1, 2, 300.0), (2, 3, 2, 300.0), pytest.param(2, 3, 4, 600.0, marks=LONG)],
)
def test_three_times_the_capacity_is_served_in_full_by_weight_and_in_time(
    seed: int, shards: int, replicas: int, seconds: float
) -> None:
    world, outcome = overload.run(seed, times=3.0, shards=shards, replicas=replicas, seconds=seconds)
    assert outcome.goodput >= 0.9
    assert outcome.worst_share <= 0.1
    assert outcome.late == 0
    assert outcome.longest_wait_s <= world.tuning.deadline_s / 2
    assert outcome.admitted < outcome.refused
    refusals = world.record.refusals()
    assert refusals[SHARE] == outcome.refused  # each refusal names the account's own limit
    assert refusals[FULL] + refusals[WAIT] == 0


def test_a_limiter_shard_that_restarts_during_the_overload_finds_the_same_shares() -> None:
    def prepare(world: World) -> None:
        world.at(100.0, lambda: world.restart_shard(0))

    world, _ = overload.run(1, shards=3, replicas=REPLICAS, prepare=prepare)
    since_s, end_s = 340.0, 660.0
    tokens = world.record.tokens(since_s, end_s)
    total, weights = sum(tokens.values()), sum(overload.WEIGHTS)
    for weight in overload.WEIGHTS:
        share = tokens[f"account-{weight}"] / total
        assert share == pytest.approx(weight / weights, rel=0.15)
    assert world.record.refusals()[LATE] == 0


def test_within_a_minute_after_the_overload_no_account_is_limited(capacity: float, mean: float) -> None:
    world = world_of()
    for name, times, end_s in (("calm", 0.4, 600.0), ("flood", 3.0, 300.0)):
        world.add_account(name)
        Stream(world, name, SHAPE, times * capacity / mean, end_s=end_s)
    world.run(300.0)
    assert world.multiplier < 1
    world.run(360.0)
    assert world.multiplier == 1
    world.run(600.0)
    assert not world.record.refusals(360.0)


def test_idle_share_is_lent_and_given_back(capacity: float, mean: float) -> None:
    world = world_of()
    for name, weight, start_s, end_s in (("always", 100, 0.0, 900.0), ("at times", 300, 300.0, 600.0)):
        world.add_account(name, weighing(weight))
        Stream(world, name, SHAPE, 1.5 * capacity / mean, start_s=start_s, end_s=end_s)
    world.run(900.0)

    def rate(name: str, start_s: float, end_s: float) -> float:
        return world.record.tokens(start_s, end_s)[name] / (end_s - start_s) / capacity

    assert rate("always", 60, 300) >= 0.9
    assert rate("at times", 360, 600) == pytest.approx(0.75, rel=0.1)
    assert rate("always", 360, 600) == pytest.approx(0.25, rel=0.1)
    assert rate("always", 660, 900) >= 0.9


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=LONG)])
def test_a_flood_never_lowers_what_accounts_below_their_share_get(seed: int, capacity: float, mean: float) -> None:
    world = world_of(seed)
    calm = [f"calm-{number}" for number in range(9)]
    streams = []
    for name in calm:
        world.add_account(name)
        streams.append(Stream(world, name, SHAPE, 0.03 * capacity / mean))  # a third of its share
    world.add_account("flood")
    # Clients that ignore retry-after.
    Workers(world, "flood", SHAPE, 60, start_s=120.0, end_s=360.0, retry_s=0.5)
    world.run(360.0)
    assert sum(stream.sent for stream in streams) > 480
    assert [stream.refused for stream in streams] == [0] * 9
    refusals = world.record.refusals()
    assert refusals[SHARE] > 0
    assert refusals[LATE] == 0


def test_after_the_loss_of_a_replica_no_request_waits_past_the_deadline(capacity: float, mean: float) -> None:
    world = world_of()
    for weight in (100, 300):
        world.add_account(f"w{weight}", weighing(weight))
        Stream(world, f"w{weight}", SHAPE, 1.5 * capacity / mean)
    world.at(200.0, lambda: world.lose_replica(back_after_s=200.0))
    world.run(600.0)

    def rate(start_s: float, end_s: float) -> float:
        return sum(world.record.tokens(start_s, end_s).values()) / (end_s - start_s) / capacity

    assert rate(60, 200) >= 0.9
    assert rate(240, 400) >= 0.9 / 2
    assert rate(460, 600) >= 0.9
    assert world.record.refusals()[LATE] == 0


def test_with_more_accounts_than_floors_fit_the_refusals_name_the_missing_capacity(
    capacity: float, mean: float
) -> None:
    # Each account is within its floor, but together they need two replicas: so it is 503 and not 429.
    device, tuning = Device(max_waiting=10_000), Tuning(floor=0.02)
    world = World(1, contract=CONTRACT, device=device, tuning=tuning, window_s=10.0)
    number, alone = 300, capacity / REPLICAS
    for name in range(number):
        world.add_account(f"account-{name}")
        Stream(world, f"account-{name}", SHAPE, 2.0 * alone / mean / number)
    world.run(600.0)
    refusals = world.record.refusals()
    assert refusals[WAIT] > 500
    assert refusals[SHARE] < 0.01 * refusals[WAIT]
    assert refusals[LATE] == 0
    assert sum(world.record.tokens(300, 600).values()) / 300 >= 0.9 * alone
