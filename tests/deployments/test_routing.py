"""Serve's handle sends the calls of a conversation to one replica, and elsewhere when that one is full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private import build_app
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RequestRouter

from deployments.apps import model
from deployments.handles import ENTRANCE
from deployments.routing import TOKENS_PER_REQUEST, ConversationRouter, router_of
from serve_app.contracts.generation import Bill, GenerateCall, SamplingParams
from serve_app.contracts.money import Price
from serve_app.gateway.conversations import MIN_BOUND
from serve_app.scaling.signals import QUEUED
from serve_app.settings import ModelArgs

MODEL = DeploymentID("Model", "smollm2")


class Replica:
    """A fake RunningReplica that takes up to `max_ongoing_requests`."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, MODEL)
        self.max_ongoing_requests = 100
        self.running = 0
        self.routing_stats: dict[str, int] = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.running


@pytest.fixture
async def router() -> RequestRouter:
    return ConversationRouter(MODEL, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)


def pending(call: Any, number: int = 0) -> PendingRequest:
    metadata = RequestMetadata(f"request-{number}", f"internal-{number}")
    return PendingRequest([call] if call is not None else [], {}, metadata)


def call(conversation: int, turn: int = 0) -> GenerateCall:
    messages = [{"role": "user", "content": f"conversation {conversation}"}]
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}] * turn
    return GenerateCall("r", tuple(messages), SamplingParams(1), 1, Bill("a", "k", "m", "b", Price(1, 1, 1)))


async def sent(router: RequestRouter, calls: Sequence[GenerateCall | None]) -> list[str]:
    """Returns the replica that each call goes to. The calls come at the same time and none of them ends."""

    async def send(number: int, one: GenerateCall | None) -> str:
        replica = await router._choose_replica_for_request(pending(one, number))
        router.on_send_request(replica.replica_id)
        return str(replica.replica_id.unique_id)

    async with asyncio.timeout(60):
        return await asyncio.gather(*(send(number, one) for number, one in enumerate(calls)))


async def test_all_turns_of_a_conversation_go_to_one_replica(router: RequestRouter) -> None:
    router.update_replicas([Replica(name) for name in ("one", "two", "three")])
    for conversation in range(10):
        places = set()
        for turn in range(4):
            places |= set(await sent(router, [call(conversation, turn)]))
            for replica in router.curr_replicas:
                router.on_new_queue_len_info(replica, 0)
        assert len(places) == 1


async def test_calls_that_come_at_once_are_bounded(router: RequestRouter) -> None:
    """50 calls of one conversation in one turn of the loop: no replica may be sent all of them."""
    router.update_replicas([Replica("one"), Replica("two")])
    places = Counter(await sent(router, [call(1)] * 50))
    assert sum(places.values()) == 50
    # Each of the router's tasks, two for each replica, may choose before the others' calls are counted.
    assert max(places.values()) <= 50 * 1.25 / 2 + 4


async def test_the_next_replica_is_asked_when_the_first_is_full(router: RequestRouter) -> None:
    replicas = [Replica("one"), Replica("two")]
    router.update_replicas(replicas)
    [home] = await sent(router, [call(1)])
    full = next(one for one in replicas if one.replica_id.unique_id == home)
    full.max_ongoing_requests = full.running = MIN_BOUND - 1
    router.on_new_queue_len_info(full.replica_id, full.running)
    assert await sent(router, [call(1)]) != [home]


async def test_while_all_are_full_the_router_pauses_between_its_rounds(
    router: RequestRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [Replica("one"), Replica("two")]
    router.update_replicas(replicas)
    for replica in replicas:
        replica.running = replica.max_ongoing_requests
    pauses: list[int] = []

    async def pause(attempt: int) -> None:
        pauses.append(attempt)
        if len(pauses) == 3:
            replicas[0].running = 0

    monkeypatch.setattr(router, "_backoff", pause)
    assert await sent(router, [call(1)]) == ["one"]
    assert pauses == [0, 1, 2]


async def test_a_call_of_another_method_goes_to_any_replica(router: RequestRouter) -> None:
    router.update_replicas([Replica("one"), Replica("two")])
    assert set(await sent(router, [None])) <= {"one", "two"}


async def test_a_replica_whose_engine_has_many_tokens_waiting_is_passed_over(router: RequestRouter) -> None:
    """Few calls with long prompts: the number of open calls alone does not show it."""
    replicas = [Replica("one"), Replica("two")]
    router.update_replicas(replicas)
    [home] = await sent(router, [call(1)])
    busy, other = sorted(replicas, key=lambda one: one.replica_id.unique_id != home)
    busy.routing_stats = {QUEUED: MIN_BOUND * TOKENS_PER_REQUEST}
    assert await sent(router, [call(1)]) == [other.replica_id.unique_id]
    other.routing_stats = busy.routing_stats
    assert await sent(router, [call(1)]) == [home]


async def test_with_one_replica_nothing_is_computed(router: RequestRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.conversation_key", None)
    router.update_replicas([Replica("one")])
    assert await sent(router, [call(1)]) == ["one"]


def test_a_conversation_stays_at_its_replica_by_default() -> None:
    assert router_of(ModelArgs(model="bundled").routing) == router_of("conversation")


def test_balanced_is_serves_own_router() -> None:
    assert router_of("balanced") is None


def test_the_setting_chooses_the_router() -> None:
    config = router_of("conversation")
    assert config is not None
    assert config.request_router_class == "deployments.routing.ConversationRouter"
    # A copy, as each process that has a handle gets it.
    assert issubclass(config.get_request_router_class(), RequestRouter)


@pytest.mark.parametrize("routing", ["balanced", "conversation"])
def test_serve_accepts_the_application_behind_haproxy(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_app, "RAY_SERVE_ENABLE_HA_PROXY", True)
    application = model({"model": "bundled", "routing": routing})
    built = build_app.build_app(application, name="smollm2", make_deployment_handle=lambda *_: None)
    assert [one.name for one in built.deployments] == ["Model", *([ENTRANCE] if routing == "conversation" else [])]


def test_another_router_is_refused() -> None:
    with pytest.raises(ValidationError):
        ModelArgs(model="bundled", routing="random")  # type: ignore[arg-type]
