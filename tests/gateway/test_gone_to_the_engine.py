"""A client that hangs up: the engine that works for it, real and stepped by the test, does not take another step."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.gateway.connections import Call
from tests.gateway.scripted_model import ScriptedModel
from tests.gateway.world import World, until


@pytest.mark.parametrize(("n", "stream"), [(1, True), (3, True), (3, False)])
async def test_every_choice_of_a_client_that_is_gone_ends_with_the_step_that_is_under_way(
    world: World, n: int, stream: bool
) -> None:
    model = ScriptedModel(*[[b"word "] * 1000 for _ in range(n)]).behind(world)
    turns = model.runner.turns = threading.Semaphore(0)
    try:
        call = Call(world, n=n, stream=stream, max_tokens=1000)
        await until(lambda: model.runner.steps)
        while model.running < n:  # the other choices begin behind the first one's first token
            turns.release()
            await asyncio.sleep(0.001)
        for _ in range(3):
            turns.release()
        if stream:
            await call.until("word")
        call.hang_up()
        await call.done()
        await until(lambda: not world.backends.running)
        # The remaining turns are used before the next step begins, which is the last one.
        before = model.runner.steps
        turns.release()
        await until(lambda: not model.running)
        assert model.runner.steps <= before + 1
        await until(lambda: world.is_idle and world.recorded == 1)
        assert world.spent > 0 or not stream  # the client pays for what it has received
    finally:
        model.close()
