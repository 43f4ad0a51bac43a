"""`system_fingerprint` in replies, and beforehand in `/models`: which backend answers, and with which weights."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.gateway.backends import Catalogue
from serve_app.settings import GatewaySettings
from tests.gateway.connections import Call
from tests.gateway.world import FULL_SETTINGS, World


def reply(fingerprint: str) -> list[Any]:
    return [Started(10, 0, fingerprint), Delta("x", 1), Finished(FinishReason.STOP, 10, 0, 1)]


async def listed(world: World, http: httpx.AsyncClient) -> dict[str, list[str]]:
    answer = await http.get("/models", headers={"authorization": f"Bearer {world.key}"})
    assert answer.status_code == 200
    return {model["id"]: model["system_fingerprints"] for model in answer.json()["data"]}


def split(world: World, backends: dict[str, int]) -> None:
    models = {"svc-chat": {**FULL_SETTINGS["models"]["svc-chat"], "backends": backends}}
    settings = GatewaySettings.model_validate({"models": models})
    world.services.catalogue = Catalogue(settings)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_has_the_fingerprint_of_the_replica_that_generated_it(world: World, stream: bool) -> None:
    seen = set()
    for weights in ("aaaa", "bbbb"):  # a redeployment under the same name
        world.backends.play(reply(weights))
        call = await Call(world, stream=stream).done()
        told = {event["system_fingerprint"] for event in call.events} if stream else {call.json["system_fingerprint"]}
        assert told == {f"fp_fake_{weights}"}
        seen |= told
    assert len(seen) == 2


async def test_the_list_of_models_has_the_fingerprints_of_replies(world: World, http: httpx.AsyncClient) -> None:
    world.backends.fingerprints["fake"] = "aaaa"
    assert await listed(world, http) == {"svc-chat": ["fp_fake_aaaa"], "svc-coder": ["fp_fake_aaaa"]}


async def test_while_traffic_is_split_the_list_has_all_backends_that_may_reply(
    world: World, http: httpx.AsyncClient
) -> None:
    up = {"status": "RUNNING", "replicas": 1}
    world.backends.report = {"old": up, "new": up, "gone": up}
    world.backends.fingerprints |= {"old": "aaaa", "new": "bbbb", "gone": "cccc"}
    split(world, {"old": 90, "new": 10, "gone": 0})
    assert await listed(world, http) == {"svc-chat": ["fp_old_aaaa", "fp_new_bbbb"]}


async def test_backends_that_can_not_be_asked_are_left_out_and_the_list_is_there_all_the_same(
    world: World, http: httpx.AsyncClient
) -> None:
    world.backends.fingerprints["fake"] = "aaaa"
    split(world, {"fake": 50, "down": 50})
    assert await listed(world, http) == {"svc-chat": ["fp_fake_aaaa"]}
    world.backends.report = None
    assert await listed(world, http) == {"svc-chat": []}
