"""The time limit of the first token and the weight of the account: sent to the replica, and the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Rejected, Rejection, Started
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, settled, until

LATE = Finished(FinishReason.DEADLINE, 10, 0, 0)


async def test_the_replica_receives_the_weight_of_the_account(world: World) -> None:
    _, heavy = world.new_account(weight=250)
    await Call(world, heavy).done()
    await Call(world).done()
    assert [call.weight for call in world.backends.calls] == [2.5, 1.0]


async def test_the_replica_receives_the_time_left_for_the_first_token_and_a_second_call_what_is_left_of_it(
    make_world: Callable[..., Any], let_pass: Callable[[float], None]
) -> None:
    world: World = await make_world(queue_timeout_s=3000.0)
    counted = asyncio.Event()
    world.backends.play([counted, Rejected(Rejection.CREDIT, prompt_tokens=500)], says("x", prompt=500))
    call = Call(world)
    await until(lambda: world.backends.running)
    let_pass(1000.0)
    counted.set()
    await call.done()
    first, second = (call.first_token_within_s for call in world.backends.calls)
    assert first is not None
    assert second is not None
    assert 2000 < first <= 3000
    assert 1000 < second <= first - 1000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waited_too_long_in_the_queue_is_503_and_consumes_nothing(
    world: World, stream: bool
) -> None:
    world.account_id, key = world.new_account(rpm=3)
    world.backends.play([LATE], says("x"))
    call = await Call(world, key, stream=stream).done()
    assert (call.status, call.json["error"]["type"]) == (503, "overloaded_error")
    assert 1 <= int(call.headers["retry-after"]) <= 60
    await settled(world, requests=0, spent=0)
    assert (await Call(world, key).done()).headers["x-ratelimit-remaining-requests"] == "2"


@pytest.mark.parametrize("before", [[Started(10, 0)], [Started(10, 0), Delta("a", 1)]], ids=["prompt", "reply"])
async def test_a_request_that_has_started_goes_on_past_the_time_in_the_queue(
    make_world: Callable[..., Any], let_pass: Callable[[float], None], before: list[Any]
) -> None:
    world: World = await make_world(queue_timeout_s=600.0)
    gate = asyncio.Event()
    rest = [Delta("a", 1), Delta("b", 2)][len(before) - 1 :]
    [script] = world.backends.play([*before, gate, *rest, Finished(FinishReason.STOP, 10, 0, 2)])
    call = Call(world, stream=True)
    await until(lambda: script.begun > len(before))
    await asyncio.sleep(0)
    let_pass(1000.0)
    gate.set()
    await call.done()
    assert (call.status, call.text) == (200, "ab")
    await settled(world, requests=1, spent=price(10, 2))
