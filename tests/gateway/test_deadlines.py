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


async def test_the_replica_receives_the_weight_and_the_time_left_for_the_first_token(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(queue_timeout_s=45.0)
    _, heavy = world.new_account(weight=250)
    await Call(world, heavy).done()
    await Call(world).done()
    first, second = world.backends.calls
    assert (first.weight, second.weight) == (2.5, 1.0)
    for call in (first, second):
        assert call.first_token_within_s is not None
        assert 40 < call.first_token_within_s <= 45


async def test_time_that_a_first_call_took_is_not_given_again(world: World) -> None:
    counted = asyncio.Event()
    world.backends.play([counted, Rejected(Rejection.CREDIT, prompt_tokens=500)], says("x", prompt=500))
    call = Call(world)
    await until(lambda: world.backends.running)
    await asyncio.sleep(0.02)
    counted.set()
    await call.done()
    first, second = (call.first_token_within_s for call in world.backends.calls)
    assert first is not None
    assert second is not None
    assert second <= first - 0.02


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_took_too_long_is_503_and_costs_nothing(world: World, stream: bool) -> None:
    world.account_id, key = world.new_account(rpm=3)
    world.backends.play([Started(10, 0), LATE], says("x"))
    call = await Call(world, key, stream=stream).done()
    assert (call.status, call.json["error"]["type"]) == (503, "overloaded_error")
    assert "retry-after" in call.headers
    await until(lambda: world.is_idle)
    assert world.spent == 0
    assert (await Call(world, key).done()).headers["x-ratelimit-remaining-requests"] == "2"


async def test_a_stream_that_was_kept_alive_and_then_waited_too_long_ends_with_an_error_event(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(keep_alive_s=0.01)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, LATE])
    call = Call(world, stream=True)
    await call.until(": keep-alive\n\n")
    gate.set()
    await call.done()
    assert call.status == 200
    assert call.events[-1]["error"]["type"] == "overloaded_error"
    assert b"[DONE]" not in call.body
    await until(lambda: world.is_idle)
    assert world.spent == 0
    assert world.books_balance()


async def test_a_reply_that_has_begun_goes_on_past_the_time_for_its_first_token(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(queue_timeout_s=0.05)
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate, Delta("b", 2), Finished(FinishReason.STOP, 10, 0, 2)])
    call = Call(world, stream=True)
    await call.until('"a"')
    await asyncio.sleep(0.1)
    gate.set()
    await call.done()
    assert (call.status, call.text) == (200, "ab")
    await settled(world, requests=1, spent=price(10, 2))
