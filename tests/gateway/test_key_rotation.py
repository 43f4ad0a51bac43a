"""The key secret is replaced while requests run: no right key is refused, and each key is moved once, behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.calls import wait_for_background
from serve_app.contracts.key_format import MANAGEMENT, KeySecrets, mark_of
from serve_app.contracts.key_secrets import ListUnmoved
from serve_app.contracts.management import CreateManagementKey
from serve_app.gateway.wrong_keys import FREE
from tests.gateway.connections import chat_body
from tests.gateway.world import OPERATOR, SECRET, World, until

NEXT = b"the secret that follows it"
BOTH, NEW = KeySecrets(NEXT, SECRET), KeySecrets(NEXT)


def client(world: World, address: str = "203.0.113.7") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False, client=(address, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def chat(world: World, key: str) -> int:
    async with client(world) as http:
        headers = {"authorization": f"Bearer {key}"}
        return (await http.post("/chat/completions", json=chat_body(), headers=headers)).status_code


async def follow(world: World) -> None:
    """What the limiters do four times a second."""
    for limiter in world.limiters:
        await limiter.service.follow()


async def moved(world: World) -> None:
    """All moves are over, and the limiters know of them."""
    assert await wait_for_background(60)
    await follow(world)


def moves(world: World) -> int:
    return sum(wire.called.count("MoveKeys") for wire in world.accountings)


def queries(*worlds: World) -> int:
    """Of gateways and limiters."""
    return sum(wire.called.count("FindKeys") for world in worlds for wire in world.accountings)


def is_stored(world: World, key: str, secret: bytes) -> bool:
    return world.ledger.find_key(keys.digest(key, secret)) is not None


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_key_works_at_gateways_of_the_old_secret_of_both_and_of_the_new_one(
    make_world: Callable[..., Any], shards: int
) -> None:
    old: World = await make_world(limiter_shards=shards)
    both: World = await make_world(beside=old, limiter_shards=shards, key_secrets=BOTH)
    new: World = await make_world(beside=old, limiter_shards=shards, key_secrets=NEW, name="gateway-3")
    assert await chat(old, old.key) == 200
    assert await chat(new, old.key) == 401  # not moved yet
    for _ in range(3):
        assert [await chat(world, old.key) for world in (both, old)] == [200, 200]
    await moved(both)
    new = await make_world(beside=old, limiter_shards=shards, key_secrets=NEW, name="gateway-4")  # of now
    for _ in range(3):
        assert [await chat(world, old.key) for world in (both, old, new)] == [200, 200, 200]
    assert is_stored(old, old.key, SECRET)
    assert is_stored(old, old.key, NEXT)


async def test_a_key_is_moved_once_however_many_requests_use_it(make_world: Callable[..., Any]) -> None:
    old: World = await make_world(limiter_shards=3)
    both: World = await make_world(beside=old, limiter_shards=3, key_secrets=BOTH)
    gate = both.accounting.wire_call.hold["MoveKeys"] = asyncio.Event()
    statuses = [asyncio.create_task(chat(both, old.key)) for _ in range(6)]
    assert set(await asyncio.gather(*statuses)) == {200}  # none waits for the move
    gate.set()
    await until(lambda: is_stored(old, old.key, NEXT))
    assert await chat(both, old.key) == 200  # before the limiter knows of it
    await moved(both)
    before = queries(old, both)
    assert await chat(both, old.key) == 200
    assert (moves(both), queries(old, both)) == (1, before)


async def test_many_keys_that_come_at_once_are_moved_in_few_calls(make_world: Callable[..., Any]) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    made = [old.new_account()[1] for _ in range(12)]
    gate = both.accounting.wire_call.hold["MoveKeys"] = asyncio.Event()
    assert set(await asyncio.gather(*(chat(both, key) for key in made))) == {200}
    gate.set()
    await moved(both)
    assert moves(both) <= 2
    assert all(is_stored(old, key, NEXT) for key in made)


async def test_while_the_ledger_refuses_the_move_requests_go_on_and_a_later_use_moves_the_key(
    make_world: Callable[..., Any],
) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    now = 0.0
    both.authenticator.moves._clock = lambda: now
    both.accounting.wire_call.down("MoveKeys")
    for _ in range(5):
        assert await chat(both, old.key) == 200
        await wait_for_background(60)
    assert moves(both) == 1
    both.accounting.wire_call.up()
    now = 60.0
    assert await chat(both, old.key) == 200
    await moved(both)
    assert is_stored(old, old.key, NEXT)


async def test_a_move_whose_answer_was_lost_is_repeated_without_harm(make_world: Callable[..., Any]) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    both.accounting.wire_call.lose.add("MoveKeys")
    assert await chat(both, old.key) == 200
    await moved(both)
    assert [await chat(world, old.key) for world in (both, old)] == [200, 200]


async def test_no_previous_secret_no_more_work(world: World) -> None:
    wrong = keys.new_key()
    before = len(world.limiter.asked)
    assert await chat(world, wrong) == 401
    digests = {ask.key_digest for ask in world.limiter.asked[before:] if hasattr(ask, "key_digest")}
    assert digests == {keys.digest(wrong, SECRET)}
    assert await chat(world, world.key) == 200
    assert moves(world) == 0


async def test_a_revoked_key_is_401_and_is_not_moved(make_world: Callable[..., Any]) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    [key] = old.ledger.list_keys(old.account_id)
    old.ledger.revoke_key(key.key_id)
    assert await chat(both, old.key) == 401
    assert moves(both) == 0


async def test_wrong_keys_are_counted_once_and_cost_as_few_queries_while_two_secrets_are_valid(
    make_world: Callable[..., Any],
) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    async with client(both) as http:
        guesses = [http.get("/models", headers={"authorization": f"Bearer {keys.new_key()}"}) for _ in range(FREE + 5)]
        statuses = sorted(answer.status_code for answer in await asyncio.gather(*guesses))
        assert statuses == [401] * FREE + [429] * 5
        assert queries(old, both) <= 3
        one = keys.new_key()
        before = queries(old, both)
        for _ in range(5):
            await http.get("/models", headers={"authorization": f"Bearer {one}"})
        assert queries(old, both) - before == 1
    assert await chat(both, old.key) == 200


async def test_a_key_that_is_made_while_both_are_valid_works_at_every_gateway_at_once(
    make_world: Callable[..., Any],
) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    new: World = await make_world(beside=old, key_secrets=NEW, name="gateway-3")
    async with client(both) as http:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        made = (await http.post(f"/admin/accounts/{old.account_id}/keys", json={}, headers=headers)).json()
    assert [await chat(world, made["key"]) for world in (old, both, new)] == [200, 200, 200]
    assert moves(both) == 0


async def test_management_keys_work_at_every_gateway_and_are_moved(make_world: Callable[..., Any]) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    key = keys.new_key(MANAGEMENT)
    old.ledger.run(CreateManagementKey(old.account_id, "robot", keys.digest(key, SECRET), keys.hint(key)))
    for world in (old, both):
        async with client(world) as http:
            assert (await http.get("/account", headers={"authorization": f"Bearer {key}"})).status_code == 200
    await moved(both)
    new: World = await make_world(beside=old, key_secrets=NEW, name="gateway-3")
    async with client(new) as http:
        assert (await http.get("/account", headers={"authorization": f"Bearer {key}"})).status_code == 200
    assert old.ledger.run(ListUnmoved(mark_of(NEXT))).moved == 1


@pytest.mark.parametrize("path", ["/account/keys", "/account/keys/{}/rotate"])
async def test_a_repeated_creation_gets_the_same_key_across_the_rotation(
    make_world: Callable[..., Any], path: str
) -> None:
    old: World = await make_world()
    both: World = await make_world(beside=old, key_secrets=BOTH)
    new: World = await make_world(beside=old, key_secrets=NEW, name="gateway-3")
    managing = keys.new_key(MANAGEMENT)
    [first] = old.ledger.list_keys(old.account_id)
    now, before = BOTH.hashed(managing)
    old.ledger.run(
        CreateManagementKey(old.account_id, "robot", now.digest, keys.hint(managing), mark=now.mark, before=before)
    )

    async def create(world: World, idempotency_key: str) -> str:
        headers = {"authorization": f"Bearer {managing}", "idempotency-key": idempotency_key}
        async with client(world) as http:
            answer = await http.post(path.format(first.key_id), json={}, headers=headers)
        assert answer.status_code == 201, answer.text
        made: str = answer.json()["key"]
        return made

    assert await create(old, "a") == await create(both, "a")
    assert await create(both, "b") == await create(new, "b")
    assert len(old.ledger.list_keys(old.account_id)) == 3
