"""Wrong keys from one address get 429 and can't use up the ledger's look-ups; right keys are not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts import key_format as keys
from serve_app.gateway import authentication
from serve_app.gateway.wrong_keys import FREE, WRONG_FOR_S, Verdict, WrongKeys
from tests.gateway.connections import Call, chat_body, http_request, served
from tests.gateway.world import FORMER_OPERATOR, OPERATOR, World, until

GUESSES = FREE + 5


def of(address: str, world: World) -> httpx.AsyncClient:
    """A client at that address, on plain HTTP without a socket."""
    transport = httpx.ASGITransport(world.app(), raise_app_exceptions=False, client=(address, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def ask(client: httpx.AsyncClient, key: str, path: str = "/models") -> httpx.Response:
    return await client.get(path, headers={"authorization": f"Bearer {key}"})


async def chat(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/chat/completions", json=chat_body(), headers={"authorization": f"Bearer {key}"})


def queries(world: World) -> int:
    """Counts the ledger queries for keys that the limiter does not know."""
    return world.accounting.called.count("FindKeys")


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with of("203.0.113.7", world) as made:
        yield made


# Guesses


@pytest.mark.parametrize("together", [False, True])
async def test_wrong_keys_beyond_the_bound_are_429(world: World, client: httpx.AsyncClient, together: bool) -> None:
    guesses = [ask(client, keys.new_key()) for _ in range(GUESSES)]
    answers = await asyncio.gather(*guesses) if together else [await guess for guess in guesses]
    assert sorted(answer.status_code for answer in answers) == [401] * FREE + [429] * (GUESSES - FREE)


async def test_wrong_keys_that_come_at_once_cost_few_queries(world: World, client: httpx.AsyncClient) -> None:
    await asyncio.gather(*(ask(client, keys.new_key()) for _ in range(GUESSES)))
    assert queries(world) <= 3


async def test_an_address_that_guesses_can_not_choose_how_many_queries_there_are(
    world: World, client: httpx.AsyncClient
) -> None:
    for _ in range(FREE):
        await ask(client, keys.new_key())
    before, beats, next_beat = queries(world), 0, world.authenticator._next_beat

    async def counted() -> None:
        nonlocal beats
        beats += world.authenticator._beat is None
        await next_beat()

    world.authenticator._next_beat = counted  # type: ignore[method-assign]
    for _ in range(3):
        await asyncio.gather(*(ask(client, keys.new_key()) for _ in range(10)))
    assert 0 < queries(world) - before <= 2 * beats  # a list of asks may be cut in two


async def test_with_several_limiters_the_bound_is_the_same(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(limiter_shards=3, accounting_shards=2)
    async with of("203.0.113.7", world) as client:
        assert (await chat(client, world.key)).status_code == 200
        before = sum(wire.called.count("FindKeys") for wire in world.accountings)
        answers = await asyncio.gather(*(ask(client, keys.new_key()) for _ in range(GUESSES)))
        assert sorted(answer.status_code for answer in answers) == [401] * FREE + [429] * (GUESSES - FREE)
        assert sum(wire.called.count("FindKeys") for wire in world.accountings) - before <= 3
        assert (await chat(client, world.key)).status_code == 200


async def test_a_guess_beyond_the_bound_is_429_with_the_time_to_wait(world: World, client: httpx.AsyncClient) -> None:
    for _ in range(FREE):
        answer = await chat(client, keys.new_key())
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = await chat(client, keys.new_key())
    assert answer.status_code == 429
    assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == ("rate_limit_error", "wrong_keys")
    wait_s = int(answer.headers["retry-after"])
    assert 1 <= wait_s <= 60
    world.now += wait_s
    assert (await chat(client, keys.new_key())).status_code == 401


async def test_a_guess_that_gets_429_is_not_taken_for_a_right_key(world: World, client: httpx.AsyncClient) -> None:
    for _ in range(FREE):
        await ask(client, keys.new_key())
    guess = keys.new_key()
    assert (await ask(client, guess)).status_code == 429
    digest = keys.digest(guess)
    assert not world.authenticator.is_confirmed(digest)
    assert digest not in world.authenticator.wrong_keys.right_keys


async def test_keys_with_a_typo_are_counted_and_never_looked_up(world: World, client: httpx.AsyncClient) -> None:
    statuses = [(await ask(client, "sk-nonsense")).status_code for _ in range(GUESSES)]
    assert statuses == [401] * FREE + [429] * (GUESSES - FREE)
    assert queries(world) == 0


async def test_the_same_wrong_key_is_looked_up_once_a_minute(world: World, client: httpx.AsyncClient) -> None:
    wrong = keys.new_key()
    statuses = [(await ask(client, wrong)).status_code for _ in range(GUESSES)]
    assert statuses == [401] * FREE + [429] * (GUESSES - FREE)
    assert queries(world) == 1
    world.now += 120
    assert (await ask(client, wrong)).status_code == 401
    assert queries(world) == 2


async def test_a_request_without_a_key_is_401_and_not_a_guess(world: World, client: httpx.AsyncClient) -> None:
    for _ in range(GUESSES):
        assert (await client.get("/models")).status_code == 401


async def test_wrong_operator_keys_are_slowed_down_and_the_right_one_is_not(
    world: World, client: httpx.AsyncClient
) -> None:
    statuses = [(await ask(client, "guess", "/admin/accounts")).status_code for _ in range(GUESSES)]
    assert statuses == [401] * FREE + [429] * (GUESSES - FREE)
    assert (await ask(client, OPERATOR, "/admin/accounts")).status_code == 200


async def test_an_operator_key_and_the_one_before_are_valid_and_no_other(
    world: World, client: httpx.AsyncClient
) -> None:
    for right in (OPERATOR, FORMER_OPERATOR):
        assert (await ask(client, right, "/admin/accounts")).status_code == 200
        assert (await ask(client, right[:-1], "/admin/accounts")).status_code == 401
    world.admin.authenticator = authentication.Authenticator(world.limiter_client, operator_keys=[OPERATOR])
    assert (await ask(client, FORMER_OPERATOR, "/admin/accounts")).status_code == 401
    assert (await ask(client, OPERATOR, "/admin/accounts")).status_code == 200


# Neighbours


async def test_a_neighbour_with_a_known_key_is_served_at_once(world: World, client: httpx.AsyncClient) -> None:
    assert (await chat(client, world.key)).status_code == 200
    for _ in range(GUESSES):
        await ask(client, keys.new_key())
    before = queries(world)
    for _ in range(3):
        assert (await chat(client, world.key)).status_code == 200
    assert queries(world) == before


@pytest.mark.parametrize("times", [1, 2])
async def test_a_neighbour_whose_key_is_not_known_yet_is_served_at_once(
    world: World, client: httpx.AsyncClient, times: int
) -> None:
    for _ in range(GUESSES):
        wrong = keys.new_key()
        for _ in range(times):  # each false key twice once used up the look-ups of all
            await ask(client, wrong)
    assert (await chat(client, world.key)).status_code == 200


async def test_look_ups_that_the_ledger_does_not_answer_hold_up_no_known_key(
    world: World, client: httpx.AsyncClient
) -> None:
    assert (await chat(client, world.key)).status_code == 200
    gate = world.accounting.wire_call.hold["FindKeys"] = asyncio.Event()
    guesses = [asyncio.create_task(ask(client, keys.new_key())) for _ in range(FREE)]
    await world.accounting.wire_call.seen("FindKeys").wait()
    async with asyncio.timeout(30):  # the limiter waits longer for a look-up
        assert (await chat(client, world.key)).status_code == 200
    gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*guesses)} == {401}


async def test_requests_that_wait_for_a_ledger_that_is_away_are_bounded(
    world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await chat(client, world.key)).status_code == 200
    monkeypatch.setattr(authentication, "MAX_WAITING", 5)
    gate = world.accounting.wire_call.hold["FindKeys"] = asyncio.Event()
    guesses = [asyncio.create_task(ask(client, keys.new_key())) for _ in range(5)]
    await until(lambda: world.authenticator._waiting == 5)
    answer = await ask(client, keys.new_key())
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert (await chat(client, world.key)).status_code == 200
    gate.set()
    await asyncio.gather(*guesses)


async def test_a_right_key_that_a_restarted_limiter_has_forgotten_is_served_at_once(
    world: World, client: httpx.AsyncClient
) -> None:
    assert (await chat(client, world.key)).status_code == 200
    for _ in range(GUESSES):
        await ask(client, keys.new_key())
    world.limiter.service = world.new_limiter()
    await world.limiter.service.follow()
    assert (await chat(client, world.key)).status_code == 200


async def test_right_keys_that_come_all_at_once_are_all_served(world: World, client: httpx.AsyncClient) -> None:
    # Behind one load balancer, after a restart: no key is known.
    new = [world.new_account()[1] for _ in range(FREE + 2)]
    answers = await asyncio.gather(*(ask(client, key) for key in new))
    assert {answer.status_code for answer in answers} == {200}


async def test_right_keys_among_guesses_that_come_all_at_once_are_served(
    world: World, client: httpx.AsyncClient
) -> None:
    new = [world.new_account()[1] for _ in range(FREE // 2)]
    mixed = [key for right in new for key in (right, keys.new_key())]
    answers = await asyncio.gather(*(ask(client, key) for key in mixed))
    assert {answer.status_code for answer in answers[::2]} == {200}


async def test_other_addresses_are_not_affected(world: World, client: httpx.AsyncClient) -> None:
    for _ in range(GUESSES):
        await ask(client, keys.new_key())
    async with of("203.0.113.8", world) as other:
        assert (await ask(other, keys.new_key())).status_code == 401


async def test_a_look_up_that_the_ledger_did_not_answer_counts_as_no_guess(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(admit_timeout_s=0.05)
    world.accounting.wire_call.down("FindKeys")
    async with of("203.0.113.7", world) as client:
        for _ in range(FREE + 5):
            assert (await ask(client, world.key)).status_code == 503
        world.accounting.wire_call.up()
        assert (await ask(client, world.key)).status_code == 200


async def test_look_ups_that_hang_do_not_hold_others_up_for_longer_than_admission_may_take(
    make_world: Callable[..., Any],
) -> None:
    world: World = await make_world(admit_timeout_s=0.1)
    gate = world.accounting.wire_call.hold["FindKeys"] = asyncio.Event()
    world.limiter.service._lookup_wait_s = 0.01
    async with of("203.0.113.7", world) as client:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(ask(client, keys.new_key()) for _ in range(FREE + 5)))
        assert {answer.status_code for answer in answers} == {503}
    gate.set()


# Addresses


async def test_a_client_can_not_choose_its_address(world: World) -> None:
    """uvicorn trusts the header only on connections from this machine."""
    body = json.dumps(chat_body()).encode()
    statuses = []
    async with served(world) as port:
        for number in range(FREE + 5):
            forged = f"x-forwarded-for: 198.51.100.{number}"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            heads = (f"content-length: {len(body)}", forged, "connection: close")
            writer.write(http_request(world, body, *heads, key=keys.new_key()))
            statuses.append(int((await reader.read()).split()[1]))
            writer.close()
    assert statuses == [401] * FREE + [429] * 5


async def test_behind_a_trusted_proxy_clients_are_distinguished(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(trusted_proxies=1)

    async def guess(client: str) -> int:
        sends = {"x-forwarded-for": f"10.1.1.1, {client}"}
        return (await Call(world, keys.new_key(), sends=sends).done()).status

    assert [await guess("198.51.100.1") for _ in range(FREE + 1)] == [401] * FREE + [429]
    assert await guess("198.51.100.2") == 401


# Memory and time


def test_the_number_of_remembered_addresses_and_keys_is_bounded() -> None:
    wrong = WrongKeys(lambda: 0.0, most_addresses=10, most_keys=10)
    for number in range(1000):
        address, digest = f"192.0.2.{number % 50}", f"key {number}"
        if wrong.verdict(address, digest) is Verdict.LOOK_UP:
            wrong.count(address)
            wrong.looked_up(digest, wrong=number % 3 > 0)
        wrong.right(f"right {number}")
    assert wrong.addresses <= 10
    assert all(len(table) <= 10 for table in (wrong.right_keys, wrong._wrong))


def test_over_any_time_an_address_gets_its_rate_and_one_burst() -> None:
    now = 0.0
    wrong = WrongKeys(lambda: now)
    counted = 0
    for number in range(4_000):  # guesses, two a second
        now = number / 2
        if wrong.verdict("a", str(number)) is Verdict.LOOK_UP:
            assert wrong.count("a") == 0
            counted += 1
        else:
            assert wrong.count("a") >= 1
        assert counted <= FREE + now * FREE / 60 + 1
    assert counted >= FREE + 2000 * FREE / 60 - 1


def test_a_wrong_key_is_taken_for_wrong_for_a_while() -> None:
    now = 0.0
    wrong = WrongKeys(lambda: now)
    wrong.looked_up("key", wrong=True)
    assert wrong.verdict("a", "key") is Verdict.WRONG
    now = WRONG_FOR_S
    assert wrong.verdict("a", "key") is Verdict.LOOK_UP


async def test_a_wrong_key_leaves_nothing_of_a_request_behind(world: World) -> None:
    for _ in range(FREE + 5):
        await Call(world, keys.new_key()).done()
    await until(lambda: world.is_idle)
    assert len(world.limiter.service.admission._open_holds) == 0
    assert world.metrics.refusals == ["invalid_api_key"] * FREE + ["wrong_keys"] * 5
