"""Requests that tokenize, from HTTP to the replica's call: free of charge, limited, and with clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.contracts.generation import Rejected, Rejection
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway import token_endpoint
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.token_endpoint import MAX_AT_ONCE, PER_QUERY
from serve_app.settings import GatewaySettings
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.scripted_model import EOS, ScriptedModel
from tests.gateway.world import FULL_SETTINGS, World, until

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


def client_of(world: World, key: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=world.app()),
        base_url="http://test",
        headers={"authorization": f"Bearer {key or world.key}"},
    )


async def asked(world: World, path: str = "/tokenize", **body: Any) -> httpx.Response:
    async with client_of(world) as client:
        return await client.post(path, json={"model": "svc-chat", **body})


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_prompt_has_the_tokens_the_count_and_the_context(world: World, prefix: str) -> None:
    answer = await asked(world, f"{prefix}/tokenize", prompt="Hé")
    assert answer.status_code == 200
    assert answer.json() == {"count": 2, "max_model_len": 32768, "tokens": [72, 233], "token_strs": None}
    named = await asked(world, f"{prefix}/tokenize", prompt="Hé", return_token_strs=True, add_special_tokens=False)
    assert named.json()["token_strs"] == ["H", "é"]
    text = await asked(world, f"{prefix}/detokenize", tokens=[72, 233])
    assert (text.status_code, text.json()) == (200, {"prompt": "Hé"})
    assert [call.add_special_tokens for _, call in world.backends.token_calls[:2]] == [True, False]


async def test_a_conversation_reaches_the_replica_as_a_chat_request_would(world: World) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    }
    assert (await asked(world, **fields)).json()["count"] == len("Be brief.Hi")
    assert (await Call(world, **fields).done()).status == 200
    [(backend, call)], [chat] = world.backends.token_calls, world.backends.calls
    assert (backend, call.account_id) == ("fake", world.account_id)
    for name in ("messages", "tools", "tool_choice", "function", "continue_final"):
        assert getattr(call, name) == getattr(chat, name)
    assert call.add_generation_prompt
    await asked(world, messages=[USER], add_generation_prompt=False)
    assert not world.backends.token_calls[-1][1].add_generation_prompt


async def test_each_answer_is_counted_by_its_path(world: World) -> None:
    await asked(world, prompt="Hi")
    await asked(world, "/v1/detokenize", tokens="wrong")
    assert world.metrics.doors == ["/tokenize", "/detokenize"]


async def test_it_is_free_of_charge_and_needs_no_balance(world: World) -> None:
    account, key = world.new_account(credit=0)
    async with client_of(world, key) as client:
        answer = await client.post("/tokenize", json={"model": "svc-chat", "prompt": "x" * 1000})
    assert answer.status_code == 200
    assert world.is_idle
    assert world.ledger.account_totals(account).requests == 0


async def test_a_key_counts_only_for_the_models_that_it_may_use(world: World) -> None:
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.update_key(key.key_id, models=("svc-coder",))
    answer = await asked(world, prompt="a")
    refused(answer, 422)
    assert answer.json()["error"]["code"] == "model_not_found"
    assert not world.backends.token_calls
    assert (await asked(world, prompt="a", model="svc-coder")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 422, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 422, "model"),
        ("/tokenize", {"prompt": "a", "model": None}, 400, "model"),
        ("/tokenize", {"messages": []}, 422, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": ""}]}, 422, "messages[0].role"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 422, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "content": "I", "prefix": True}], "add_generation_prompt": False},
            422,
            "add_generation_prompt",
        ),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [0, -1]}, 422, "tokens[1]"),
        ("/detokenize", {"tokens": [2**31]}, 422, "tokens[0]"),
        ("/detokenize", {"tokens": [2**63]}, 422, "tokens[0]"),
        ("/detokenize", {"tokens": [10**400]}, 422, "tokens[0]"),
        ("/detokenize", {"tokens": [], "model": "other"}, 422, "model"),
    ],
)
async def test_a_wrong_body_is_refused_with_the_field_at_fault(
    world: World, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await asked(world, path, **body)
    refused(answer, status)
    assert answer.json()["error"]["param"] == param
    assert not world.backends.token_calls


@pytest.mark.parametrize("is_real", [True, False], ids=["replica", "fake"])
async def test_an_id_outside_the_vocabulary_is_refused_by_name(world: World, is_real: bool) -> None:
    outside = EOS + 1 if is_real else 0x110000
    model = ScriptedModel([b"a"]).behind(world) if is_real else None
    for token in (outside, 2**31 - 1):
        answer = await asked(world, "/detokenize", tokens=[97, token])
        refused(answer, 422, f"{token} is not a token of the model: ids are from 0 to {outside - 1}")
        assert answer.json()["error"]["param"] == "tokens"
    assert (await asked(world, "/detokenize", tokens=[97])).json() == {"prompt": "a"}
    if model is not None:
        model.close()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize"])
async def test_it_needs_a_key_and_a_post(world: World, path: str) -> None:
    async with client_of(world, "wrong") as client:
        refused(await client.post(path, json={}), 401)
    async with client_of(world, "sk-" + "0" * 64) as client:
        refused(await client.post(path, json={}), 401)
    async with client_of(world) as client:
        refused(await client.get(path), 405, "Use POST")
        refused(await client.post(path, content=b"{"), 400, "not valid JSON")


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (Rejected(Rejection.CONTEXT, limit=32768), 422, "more than 32768"),
        (Rejected(Rejection.INVALID, message="7 is not a token", param="tokens"), 422, "7 is not a token"),
        (BackendUnavailable("gone"), 503, "try again"),
        (RuntimeError("fault"), 500, "failed to process"),
    ],
    ids=repr,
)
async def test_what_a_replica_refuses_and_a_lost_replica_are_told(
    world: World, answer: Rejected | BaseException, status: int, says: str
) -> None:
    world.backends.tokenized = answer
    response = await asked(world, prompt="a")
    refused(response, status, says)
    assert ("retry-after" in response.headers) is (status == 503)


async def test_a_replica_that_does_not_answer_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_endpoint, "ANSWER_S", 0.001)
    world.backends.tokenized = asyncio.Event()
    refused(await asked(world, prompt="a"), 503, "try again")


async def test_a_key_has_a_rate_that_grows_with_the_size_of_its_bodies(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = await make_world(queries_per_minute=1)
    assert [(await asked(world, prompt="a")).status_code for _ in range(PER_QUERY)] == [200] * PER_QUERY
    answer = await asked(world, prompt="a")
    refused(answer, 429, "count or convert tokens")
    assert "retry-after" in answer.headers
    async with client_of(world) as client:
        assert (await client.get("/models")).status_code == 200, "other queries have their own rate"
    _, other = world.new_account()
    large = {"model": "svc-chat", "prompt": "x" * 400_000}
    async with client_of(world, other) as client:
        assert (await client.post("/tokenize", json=large)).status_code == 200
        refused(await client.post("/tokenize", json=large), 429)


async def test_an_account_has_few_at_once_and_others_do_not_wait(world: World) -> None:
    gate = world.backends.tokenized = asyncio.Event()
    waiting = [asyncio.create_task(asked(world, prompt="a")) for _ in range(MAX_AT_ONCE)]
    await until(lambda: len(world.backends.token_calls) == MAX_AT_ONCE)
    refused(await asked(world, prompt="a"), 429, "at once")
    world.backends.tokenized = None
    _, other = world.new_account()
    async with client_of(world, other) as client:
        assert (await client.post("/tokenize", json={"model": "svc-chat", "prompt": "a"})).status_code == 200
    gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * MAX_AT_ONCE
    assert (await asked(world, prompt="a")).status_code == 200


async def test_a_model_that_is_removed_meanwhile_still_answers(world: World) -> None:
    gate = world.backends.tokenized = asyncio.Event()
    waiting = asyncio.create_task(asked(world, prompt="a"))
    await until(lambda: world.backends.token_calls)
    models = {"other": FULL_SETTINGS["models"]["svc-chat"]}
    world.services.catalogue = Catalogue(GatewaySettings.model_validate({"models": models}))
    gate.set()
    assert (await waiting).json()["max_model_len"] == 32768
    refused(await asked(world, prompt="a"), 422, "'svc-chat' does not exist")


async def test_a_client_that_hangs_up_frees_its_place(world: World) -> None:
    world.backends.tokenized = asyncio.Event()
    tasks = [asyncio.create_task(asked(world, prompt="a")) for _ in range(MAX_AT_ONCE)]
    await until(lambda: len(world.backends.token_calls) == MAX_AT_ONCE)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    world.backends.tokenized = None
    assert (await asked(world, prompt="a")).status_code == 200
