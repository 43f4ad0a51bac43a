"""`GET /admin/live`: what goes on now, of all limiter shards together, also while parts of the service are away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from serve_app.admin.document import build_document
from serve_app.contracts.calls import shard_of
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import Admit, Grant, PressureReport
from serve_app.contracts.money import format_amount
from serve_app.settings import GatewaySettings
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.world import FULL_SETTINGS, OPERATOR, PRICE_IN, PRICE_OUT, World, price

SHARDS = 3
MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def shards(make_world: MakeWorld) -> World:
    return await make_world(limiter_shards=SHARDS)


async def live(world: World, **query: Any) -> Any:
    transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {OPERATOR}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        answer = await client.get("/admin/live", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def admitted(world: World, key: str, number: int = 0) -> None:
    ask = Admit(f"{key}-{number}", "g", digest(key), "svc-chat", 10, 20, PRICE_IN, PRICE_OUT, backend="fake")
    assert isinstance(await world.limiter_client.ask(ask), Grant)


def new_accounts(world: World, each: int) -> dict[str, str]:
    """Accounts with their keys, so many of each shard."""
    keys: dict[str, str] = {}
    counts: Counter[int] = Counter()
    while len(keys) < each * SHARDS:
        account, key = world.new_account()
        shard = shard_of(account, SHARDS)
        if counts[shard] < each:
            counts[shard] += 1
            keys[account] = key
    return keys


async def reported(world: World, backend: str = "fake", replica: str = "r", **more: Any) -> None:
    """A replica's report, which it sends to every shard."""
    figures = {"queue_age_s": 0.0, "kv_used": 0.5, "queued_prefill_tokens": 7, "waiting": 0, "running": 3} | more
    for limiter in world.limiters:
        await limiter.service.ask([PressureReport(backend, replica, **figures)])


async def test_open_requests_and_money_are_summed_over_the_shards_and_replicas_are_not(shards: World) -> None:
    keys = new_accounts(shards, each=3)
    for number, key in enumerate(keys.values()):
        await admitted(shards, key)
        if number < 2:
            await admitted(shards, key, 1)
    await reported(shards)
    shown = await live(shards, top=5)
    held = price(10, 20)
    assert (shown["open_requests"], shown["held"]) == (11, format_amount(11 * held))
    assert [(one["shard"], one["admits"]) for one in shown["limiters"]] == [(0, True), (1, True), (2, True)]
    assert sum(one["open_requests"] for one in shown["limiters"]) == 11
    [backend] = shown["backends"]
    assert (backend["name"], backend["status"], backend["replicas"]) == ("fake", "RUNNING", 1)
    assert backend["load"] == {
        "replicas": 1, "running": 3, "waiting": 0, "queue_age_s": 0, "kv_used": 0.5, "queued_prefill_tokens": 7,
        "tokens_per_s": 0, "pressure": 0, "effective_share": 1,
    }  # fmt: skip
    busiest = [(one["id"], one["open_requests"], one["held"], one["name"]) for one in shown["accounts"]]
    first = sorted(list(keys)[:2])
    assert busiest[:2] == [(account, 2, format_amount(2 * held), "Ada") for account in first]
    assert [one[0] for one in busiest[2:]] == sorted(list(keys)[2:])[:3]
    assert {one["tokens_limit"] for one in shown["accounts"]} == {10**6}
    assert all(one["effective_share"] == 1 for one in shown["accounts"])


async def test_weights_and_shares_of_traffic_stand_beside_the_backends(make_world: MakeWorld) -> None:
    priced = FULL_SETTINGS["models"]["svc-chat"]["price"]
    models = {
        "svc-chat": {"backends": {"old": 75, "new": 25, "new:adapter": 0}, "price": priced},
        "svc-coder": {"backends": {"old": 1}, "price": priced},
    }
    world = await make_world(models=models)
    shown = await live(world)
    assert [(model["id"], [tuple(one.values()) for one in model["backends"]]) for model in shown["models"]] == [
        ("svc-chat", [("old", 75, 0.75), ("new", 25, 0.25), ("new:adapter", 0, 0.0)]),
        ("svc-coder", [("old", 1, 1.0)]),
    ]
    missing = {"status": "MISSING", "replicas": 0, "load": None}
    assert shown["backends"] == [{"name": name} | missing for name in ("old", "new")], "each application once"


async def test_a_backend_that_no_identifier_names_is_shown_while_its_replicas_report(world: World) -> None:
    await reported(world, backend="retired")
    assert [one["name"] for one in (await live(world))["backends"]] == ["fake", "retired"]
    world.passed_s += 10
    assert [one["name"] for one in (await live(world))["backends"]] == ["fake"]


async def test_pressure_is_shown_on_the_backend_and_on_the_accounts_that_use_it(world: World) -> None:
    await admitted(world, world.key)
    for _ in range(12):
        world.passed_s += 0.5
        await reported(world, queue_age_s=3.0, waiting=9)
    shown = await live(world)
    [backend] = shown["backends"]
    assert backend["load"]["pressure"] == pytest.approx(4)
    assert 0 < backend["load"]["effective_share"] < 1
    [account] = shown["accounts"]
    assert account["effective_share"] == pytest.approx(backend["load"]["effective_share"], rel=0.05)


async def test_while_a_shard_is_away_the_others_are_shown(shards: World) -> None:
    keys = new_accounts(shards, each=1)
    for key in keys.values():
        await admitted(shards, key)
    shards.limiters[1].wire.down()
    shown = await live(shards)
    assert [one["admits"] for one in shown["limiters"]] == [True, None, True]
    assert {one["id"] for one in shown["accounts"]} == {account for account in keys if shard_of(account, SHARDS) != 1}
    shards.limiters[0].wire.down()
    shards.limiters[2].wire.down()
    with pytest.raises(AssertionError, match="limiter is restarting"):
        await live(shards)


async def test_a_shard_that_does_not_answer_is_not_waited_for_long(
    shards: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.gateway.limiter_client.LIVE_TIMEOUT_S", 0.01)
    shards.limiters[2].wire.hold["Live"] = asyncio.Event()
    assert (await live(shards))["limiters"][2]["admits"] is None


async def test_while_serve_cannot_be_asked_what_the_limiter_sees_is_shown(world: World) -> None:
    await reported(world)
    world.backends.report = None
    [backend] = (await live(world))["backends"]
    assert (backend["status"], backend["replicas"], backend["load"]["running"]) == (None, None, 3)


async def test_watching_leaves_no_audit_record_and_asks_nothing_of_the_ledger(world: World) -> None:
    await admitted(world, world.key)
    before = list(world.accounting.called)
    for _ in range(3):
        await live(world)
    assert world.accounting.called == before
    assert world.ledger.audit_log() == []


async def test_what_waits_in_a_gateways_spool_is_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.gateway.limiter_client.HEARTBEAT_S", 0.02)

    async def until(is_as_wanted: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(60):
            while True:
                gateways = (await live(world))["gateways"]
                if gateways and is_as_wanted(gateways[0]["spool"]):
                    return gateways[0]
                await asyncio.sleep(0.02)

    world.limiter_client.start()
    assert (await until(lambda spool: spool is None))["holder"] == world.name
    world.settlements.settle_timeout_s = 0.05
    world.accounting.wire_settle.down()
    world.settlements.start()
    assert (await Call(world).done()).status == 200
    spool = (await until(lambda spool: spool is not None and spool["settlements"] == 1))["spool"]
    assert spool["ledger_away"]
    assert spool["bytes"] > 0
    world.accounting.wire_settle.up()
    empty = {"settlements": 0, "bytes": 0, "age_s": 0, "ledger_away": False}
    await until(lambda spool: spool == empty)


async def test_the_answer_is_as_the_document_says(world: World) -> None:
    await admitted(world, world.key)
    await reported(world)
    document = build_document(GatewaySettings.model_validate(FULL_SETTINGS).models)
    schema = {"$ref": "#/components/schemas/Live", "components": document["components"]}
    Draft202012Validator(schema).validate(await live(world))


async def test_another_number_of_accounts_is_refused(admin: httpx.AsyncClient) -> None:
    for top in ("-1", "101", "many"):
        refused(await admin.get("/admin/live", params={"top": top}), 422, "top")
