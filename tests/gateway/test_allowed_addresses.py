"""A key with allowed addresses opens nothing from elsewhere: no body is read, nothing is charged or shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import httpx
import pytest

from serve_app.api import chat_door
from serve_app.contracts import key_format as keys
from tests.gateway.connections import Call, chat_body, http_request, served
from tests.gateway.test_bodies import Upload
from tests.gateway.test_refusals import new_key
from tests.gateway.test_wrong_keys import of
from tests.gateway.world import World, price, settled, until

HERE, ELSEWHERE = "203.0.113.7", "198.51.100.9"
PATHS = ("/models", "/v1/models/svc-chat", "/user/balance", "/user/usage")


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"] if answer.status_code != 200 else ""


async def chat(world: World, key: str, address: str, **headers: str) -> httpx.Response:
    async with of(address, world) as client:
        sent = {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return await client.post("/chat/completions", json=chat_body(), headers=sent)


@pytest.fixture
def bound(world: World) -> str:
    """A key that is for HERE alone."""
    return new_key(world, addresses=[HERE, "2001:db8:0:1::7"])[1]


@pytest.fixture
async def port(world: World) -> AsyncIterator[int]:
    async with served(world) as number:
        yield number


async def test_chat_from_another_address_is_403_which_names_it_and_consumes_nothing(world: World, bound: str) -> None:
    assert code_of(await chat(world, bound, HERE)) == (200, "")
    for _ in range(3):
        answer = await chat(world, bound, ELSEWHERE, idempotency_key="once")
        assert code_of(answer) == (403, "address_not_allowed")
        assert answer.json()["error"]["type"] == "permission_error"
        assert f"the address {ELSEWHERE}." in answer.json()["error"]["message"]
    assert code_of(await chat(world, bound, HERE, idempotency_key="once")) == (200, "")
    await settled(world, requests=2, spent=2 * price(10, 2))
    assert world.metrics.refusals == ["address_not_allowed"] * 3
    seen = [(record.status, record.account_id, record.key_id != "") for record in world.records if record.code]
    assert seen == [(403, world.account_id, True)] * 3, "the log says whose key is used from elsewhere"
    assert code_of(await chat(world, world.key, ELSEWHERE)) == (200, "")


async def test_no_other_path_opens_from_another_address(world: World, bound: str) -> None:
    for path, (address, status) in product(PATHS, ((ELSEWHERE, 403), (HERE, 200), (ELSEWHERE, 403))):
        async with of(address, world) as client:
            answer = await client.get(path, headers={"authorization": f"Bearer {bound}"})
        assert answer.status_code == status, (path, address)


async def test_an_ipv6_address_counts_as_a_whole_and_a_mapped_one_as_ipv4(world: World, bound: str) -> None:
    assert code_of(await chat(world, bound, "2001:db8:0:1::7")) == (200, "")
    answer = await chat(world, bound, "2001:db8:0:1::8")
    assert code_of(answer) == (403, "address_not_allowed")
    assert "2001:db8:0:1::8." in answer.json()["error"]["message"]
    assert code_of(await chat(world, bound, f"::ffff:{HERE}")) == (200, "")


@pytest.mark.parametrize("used_before", [False, True], ids=["new", "used from its address a moment ago"])
async def test_a_body_from_another_address_is_neither_awaited_nor_parsed(
    world: World, port: int, monkeypatch: pytest.MonkeyPatch, used_before: bool
) -> None:
    _, key = new_key(world, addresses=[HERE])
    if used_before:
        assert code_of(await chat(world, key, HERE)) == (200, "")
    monkeypatch.setattr(chat_door, "parse_chat_request", pytest.fail)
    one = Upload(*await asyncio.open_connection("127.0.0.1", port))
    await one.send(http_request(world, b"", "content-length: 4000", key=key))
    status, headers, body = await one.answer()
    assert (status, body["error"]["code"], headers["connection"]) == (403, "address_not_allowed", "close")
    assert "127.0.0.1" in body["error"]["message"]
    one.writer.close()


async def test_a_wrong_body_from_another_address_is_403_and_not_400(world: World) -> None:
    """Also of a key that got its addresses a moment ago, whose body is read because it was confirmed before."""
    key_id, key = new_key(world)
    assert code_of(await chat(world, key, ELSEWHERE)) == (200, "")
    world.ledger.update_key(key_id, addresses=[HERE])
    await world.limiter.service.follow()
    async with of(ELSEWHERE, world) as client:
        answer = await client.post("/chat/completions", content=b"{", headers={"authorization": f"Bearer {key}"})
    assert code_of(answer) == (403, "address_not_allowed")


async def test_addresses_given_or_taken_a_moment_ago_count(world: World) -> None:
    key_id, key = new_key(world)
    expected: list[tuple[list[str] | None, int]] = [(None, 200), ([HERE], 403), ([HERE, "198.51.100.0/24"], 200)]
    for addresses, status in [*expected, ([HERE], 403), (None, 200)]:
        world.ledger.update_key(key_id, addresses=addresses)
        await world.limiter.service.follow()
        assert (await chat(world, key, ELSEWHERE)).status_code == status, addresses


async def test_a_stored_reply_is_not_sent_to_another_address(world: World, bound: str) -> None:
    first = await chat(world, bound, HERE, idempotency_key="mine")
    again = await chat(world, bound, HERE, idempotency_key="mine")
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert code_of(await chat(world, bound, ELSEWHERE, idempotency_key="mine")) == (403, "address_not_allowed")


async def test_behind_a_trusted_proxy_the_clients_address_counts(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(trusted_proxies=1)
    _, key = new_key(world, addresses=[HERE])
    for client, status in ((HERE, 200), (f"{HERE}:4711", 200), (f"{HERE}, {ELSEWHERE}", 403), (ELSEWHERE, 403)):
        call = await Call(world, key, sends={"x-forwarded-for": client}).done()
        assert call.status == status, client


async def test_a_client_can_not_choose_its_address(world: World, port: int) -> None:
    """uvicorn takes the address from the header on connections from this machine, which a balancer's are."""
    _, key = new_key(world, addresses=[HERE])
    body = json.dumps(chat_body()).encode()
    forms = (HERE, f"{HERE}, {HERE}", f"{HERE}:1", f"::ffff:{HERE}", f"[{HERE}]", f"[{HERE}]:x", f"[{HERE}:80]")
    for forged in (*forms, f"[[{HERE}]", f"{HERE} :80", f"[ {HERE}]", f"[::ffff:{HERE}]", f"[[::ffff:{HERE}]"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        heads = (f"content-length: {len(body)}", f"x-forwarded-for: {forged}", "connection: close")
        writer.write(http_request(world, body, *heads, key=key))
        assert b"address_not_allowed" in await reader.read(), forged
        writer.close()
    assert world.backends.calls == []


async def test_with_several_limiters_and_unknown_keys_it_is_the_same(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(limiter_shards=3, accounting_shards=2)
    for _ in range(4):
        _, key = new_key(world, addresses=[HERE])
        assert code_of(await chat(world, key, ELSEWHERE)) == (403, "address_not_allowed")
        assert code_of(await chat(world, key, HERE)) == (200, "")
    await until(lambda: world.is_idle)


async def test_a_key_without_addresses_costs_no_further_hop_and_one_with_them_one(world: World, bound: str) -> None:
    hops = []
    for key in (world.key, bound):
        for _ in range(3):
            assert code_of(await chat(world, key, HERE)) == (200, "")
            hops.append([type(ask).__name__ for ask in world.limiter.asked].count("Identify"))
    assert hops == [2, 2, 2, 4, 5, 6]


async def test_a_wrong_key_that_is_429_is_not_taken_for_a_right_one(world: World) -> None:
    wrong = keys.new_key()
    statuses = [(await chat(world, wrong, ELSEWHERE)).status_code for _ in range(25)]
    assert statuses[-1] == 429
    assert not world.authenticator.is_confirmed(keys.digest(wrong))
