"""Gateways and limiters with different numbers of shards: in any order, no request is admitted by two limiters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts.generation import Delta, Started
from serve_app.contracts.limiting import Admit
from tests.gateway.connections import Call
from tests.gateway.world import World, says, settled, until


def admits(world: World) -> int:
    return sum(isinstance(ask, Admit) for limiter in world.limiters for ask in limiter.asked)


async def ready(world: World) -> httpx.Response:
    transport = httpx.ASGITransport(world.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get("/ready")


@pytest.mark.parametrize(("counts", "there"), [(1, 3), (2, 3)])
async def test_a_gateway_with_another_number_of_shards_is_refused_and_logs_why(
    make_world: Callable[..., Any], caplog: pytest.LogCaptureFixture, counts: int, there: int
) -> None:
    running: World = await make_world(limiter_shards=there)
    limiters = [wire.service for wire in running.limiters]
    strange: World = await make_world(beside=running, limiters=limiters[:counts])
    for _ in range(2):
        refused = await Call(strange).done()
        assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert not strange.backends.calls
    assert admits(strange) == 0
    said = f"limiter_shards is {there} in a limiter and {counts} in this gateway"
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) <= counts  # by each limiter once
    assert all(said in line and "with the service stopped" in line for line in told)
    answer = await ready(strange)
    assert answer.status_code == 503
    assert said in answer.json()["error"]["message"]
    # Gateways with the right number are not affected.
    assert (await Call(running).done()).status == 200
    assert (await ready(running)).status_code == 200
    await settled(running, requests=1, spent=running.spent)


async def test_a_change_of_the_number_under_way_admits_nothing_before_the_old_requests_have_ended(
    make_world: Callable[..., Any],
) -> None:
    old: World = await make_world()
    old.limiter_client.start()
    gate = asyncio.Event()
    old.backends.play([Started(10, 0), Delta("a", 1), gate, *says("a", "b")[2:]])
    call = Call(old, stream=True)
    await call.until('"a"')

    # Both shards of the new number start, the first one replaces the old one; then a new gateway starts.
    shards = [old.new_limiter(shards=2) for _ in range(2)]
    for shard in shards:
        await shard.follow()
    old.limiter.service = shards[0]
    await until(lambda: old.limiter_client.disagreement is not None)
    new: World = await make_world(beside=old, limiters=shards)
    new.limiter_client.start()
    for world in (old, new):
        refused = await Call(world).done()
        assert refused.status == 503
    disagreement = (await ready(new)).json()["error"]["message"]
    assert "a gateway with limiter_shards 1 instead of 2 has requests open" in disagreement

    # The stream of the old gateway ends normally; a lease later the new gateway admits everything.
    gate.set()
    assert (await call.done()).data[-1] == "[DONE]"
    await until(lambda: old.limiter_client.open_requests == 0)
    await old.limiter_client.stop()
    old.passed_s += 10.0
    await until(lambda: new.limiter_client.disagreement is None)
    assert (await Call(new).done()).status == 200
    await until(lambda: old.recorded == 2)


async def test_the_count_is_asked_once_by_a_gateway_not_by_each_request(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(limiter_shards=3)
    for _ in range(4):
        assert (await Call(world).done()).status == 200
    renewals = [sum(type(ask).__name__ == "Renew" for ask in limiter.asked) for limiter in world.limiters]
    assert renewals == [1, 1, 1]


async def test_one_shard_that_is_away_does_not_keep_a_gateway_that_has_agreed_from_the_others(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(limiter_shards=3)
    assert (await Call(world).done()).status == 200
    home = next(index for index, limiter in enumerate(world.limiters) if limiter.service.admission._accounts)
    world.limiter_client.start()
    for index, limiter in enumerate(world.limiters):
        if index != home:
            limiter.wire.down()
    assert (await Call(world).done()).status == 200
