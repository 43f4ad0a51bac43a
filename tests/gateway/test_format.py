"""The fields of the chat format from the body to the replica, and what comes of its answers."""

from __future__ import annotations

from serve_app.backend.messages import Rejected, Rejection
from tests.gateway.connections import Call
from tests.gateway.world import World, settled

# logit_bias


async def test_a_logit_bias_reaches_the_replica(world: World) -> None:
    assert (await Call(world, logit_bias={"5": -100, "7": 1.5}).done()).status == 200
    assert world.backends.calls[0].sampling.logit_bias == ((5, -100.0), (7, 1.5))


async def test_what_only_the_replica_can_refuse_is_422_names_the_field_and_costs_nothing(world: World) -> None:
    world.backends.play([Rejected(Rejection.INVALID, message="no such tokens", param="logit_bias")])
    for stream in (False, True):
        call = await Call(world, logit_bias={"999999": 1}, stream=stream).done()
        assert call.status == 422
        error = call.json["error"]
        assert (error["param"], error["code"]) == ("logit_bias", "invalid_parameter")
    await settled(world, requests=0, spent=0)
