"""The endpoints for API keys besides chat, as client libraries read them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from serve_app.admin import public
from serve_app.contracts import key_format as keys
from serve_app.contracts.limiting import Identity
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.query_rates import AT_ONCE, QueryRates
from serve_app.settings import GatewaySettings
from tests.accounting.books import settlement
from tests.gateway.connections import Call
from tests.gateway.world import FULL_SETTINGS, OPERATOR, World


def client_of(world: World, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(world.app())
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers={"authorization": f"Bearer {key}"})


@pytest.fixture
async def user(world: World, http: httpx.AsyncClient) -> httpx.AsyncClient:
    http.headers["authorization"] = f"Bearer {world.key}"
    return http


async def test_models_show_lengths_and_recommended_temperatures(user: httpx.AsyncClient) -> None:
    listed: dict[str, Any] = (await user.get("/models")).json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["svc-chat", "svc-coder"])
    chat, coder = listed["data"]
    assert (chat["object"], chat["context_length"], chat["max_output_length"]) == ("model", 32768, 4096)
    assert list(chat["recommended_temperatures"].values()) == [0.0, 0.7, 1.0, 1.1, 1.25]
    assert list(coder["recommended_temperatures"].values()) == [1.0]
    for model in listed["data"]:
        openai.types.Model.model_validate(model)
    assert (await user.get("/models/svc-coder")).json() == coder


async def test_an_alias_is_listed_as_a_model_of_its_own(world: World, user: httpx.AsyncClient) -> None:
    models = {**FULL_SETTINGS["models"]}
    models["svc-chat"] = {**models["svc-chat"], "aliases": ["openai/gpt-4o", "claude-*"]}
    world.services.catalogue = Catalogue(GatewaySettings.model_validate({**FULL_SETTINGS, "models": models}))
    listed = (await user.get("/models")).json()["data"]
    assert [(model["id"], model["alias_of"]) for model in listed] == [
        ("svc-chat", None), ("svc-coder", None), ("openai/gpt-4o", "svc-chat"),
    ]  # fmt: skip
    assert [model["aliases"] for model in listed] == [["openai/gpt-4o", "claude-*"], [], []]
    for path in ("/models/openai/gpt-4o", "/v1/models/openai%2Fgpt-4o"):
        assert (await user.get(path)).json() == listed[2]
    assert (await user.get("/models/claude-opus")).json() == listed[2] | {
        "id": "claude-opus", "display_name": "claude-opus",
    }  # fmt: skip
    assert (await user.get("/models/gpt-5")).status_code == 404


class ModelInfo(BaseModel):
    """What Anthropic's SDK requires of a model."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: datetime
    lifecycle: Literal["active", "deprecated", "retired"]


async def test_the_list_has_what_both_sdks_require(user: httpx.AsyncClient) -> None:
    listed = (await user.get("/models")).json()
    for model in listed["data"]:
        openai.types.Model.model_validate(model, strict=True)
        read = ModelInfo.model_validate(model)
        assert read.created_at.timestamp() == model["created"]
        assert model["max_model_len"] == model["max_input_tokens"] == model["context_length"]
        assert model["max_tokens"] == model["max_output_length"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "svc-chat", "svc-coder")


async def test_the_balance_is_sent_as_decimal_strings(user: httpx.AsyncClient) -> None:
    assert (await user.get("/user/balance")).json() == {
        "is_available": True,
        "balance_infos": [
            {"currency": "USD", "total_balance": "1.00", "granted_balance": "0.00", "topped_up_balance": "1.00"}
        ],
    }


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [(None, {"day"}), ("", {"day"}), ("model", {"model"}), ("key, model", {"key_id", "model"}), (",", set())],
)
async def test_a_usage_row_has_only_the_columns_of_its_grouping(
    world: World, user: httpx.AsyncClient, group_by: str | None, groups: set[str]
) -> None:
    await Call(world).done()
    body = (await user.get("/user/usage", params={} if group_by is None else {"group_by": group_by})).json()
    [row] = body["data"]
    sums = {"requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens", "charged"}
    assert (body["object"], set(row)) == ("list", sums | groups)
    assert (row["total_tokens"], row["charged"]) == (12, "0.000016")


async def test_usage_of_days_in_the_wrong_order_is_refused(user: httpx.AsyncClient) -> None:
    days = {"from": "2026-11-02", "to": "2026-11-01"}
    admin_key = {"authorization": f"Bearer {OPERATOR}"}
    for path, headers in (("/user/usage", user.headers), ("/admin/usage", admin_key)):
        answer = await user.get(path, params=days, headers=headers)
        assert answer.status_code == 422, path
        assert "the first day, 2026-11-02, is after the last day, 2026-11-01" in answer.json()["error"]["message"]
        assert (await user.get(path, params={"from": "2026-11-02", "to": "2026-11-02"}, headers=headers)).is_success


@pytest.mark.parametrize("group_by", ["day", "day,model,key", ","])
async def test_usage_and_balance_are_of_the_callers_account_alone(
    world: World, user: httpx.AsyncClient, group_by: str
) -> None:
    _, others_key = world.new_account()
    for _ in range(2):
        assert (await Call(world, others_key).done()).status == 200
    params = {"group_by": group_by}
    assert (await user.get("/user/usage", params=params)).json()["data"] == []
    assert (await Call(world).done()).status == 200
    [own] = (await user.get("/user/usage", params=params)).json()["data"]
    assert (own["requests"], own["charged"]) == (1, "0.000016")
    [others] = (await user.get("/user/usage", params=params, headers={"authorization": f"Bearer {others_key}"})).json()[
        "data"
    ]
    assert (others["requests"], others["charged"]) == (2, "0.000032")
    [balance] = (await user.get("/user/balance")).json()["balance_infos"]
    assert balance["total_balance"] == "0.999984"


QUERIES = ["/user/balance", "/user/usage", "/v1/models", "/models/svc-chat"]


@pytest.mark.parametrize("path", QUERIES)
async def test_queries_have_a_rate_of_their_own(make_world: Any, path: str) -> None:
    world: World = await make_world(queries_per_minute=3)
    now = 0.0
    world.admin.queries._clock = lambda: now  # the bucket does not drain while the test runs
    async with client_of(world, world.key) as user:
        assert [(await user.get(path)).status_code for _ in range(3)] == [200] * 3
        asked = len(world.accounting.called)
        refused = await user.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "requests")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("20", "20000")
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert len(world.accounting.called) == asked, "a query over its rate costs the ledger nothing"
        chat = await Call(world).done()
        assert (chat.status, chat.headers["x-ratelimit-remaining-requests"]) == (200, "999")
        _, others = world.new_account()
        assert (await user.get(path, headers={"authorization": f"Bearer {others}"})).status_code == 200
        now += 20.1
        assert (await user.get(path)).status_code == 200


async def test_an_account_has_four_times_the_queries_of_a_key(make_world: Any) -> None:
    world: World = await make_world(queries_per_minute=2)
    world.admin.queries._clock = lambda: 0.0
    answers = []
    for number in range(6):
        key = keys.new_key()
        world.ledger.create_key(world.account_id, f"{number}", keys.digest(key), keys.hint(key))
        async with client_of(world, key) as user:
            answers += [(await user.get("/user/balance")).status_code for _ in range(3)]
    assert answers == [200, 200, 429] * 4 + [429] * 6


async def test_usage_of_many_groups_counts_as_many_queries_and_has_an_end(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = await make_world(queries_per_minute=10)
    world.admin.queries._clock = lambda: 0.0
    monkeypatch.setattr(public, "GROUPS_OF_A_QUERY", 1)
    [key] = world.ledger.list_keys(world.account_id)
    days = [1_780_315_200.0 + 86_400 * number for number in range(4)]
    world.ledger.settle([settlement(f"r{at}", world.account_id, key.key_id, finished_at=at) for at in days])
    async with client_of(world, world.key) as user:
        assert len((await user.get("/user/usage")).json()["data"]) == 4
        assert [(await user.get("/user/balance")).status_code for _ in range(6)] == [200] * 5 + [429]
    monkeypatch.setattr(public, "MAX_GROUPS", 3)
    world.admin.queries._clock = lambda: 3600.0
    async with client_of(world, world.key) as user:
        refused = await user.get("/user/usage")
        assert (refused.status_code, refused.json()["error"]["type"]) == (422, "invalid_request_error")
        assert "more than 3 groups" in refused.json()["error"]["message"]
        assert (await user.get("/user/usage", params={"group_by": "model"})).status_code == 200


async def test_a_key_without_balance_reads_its_balance(world: World, user: httpx.AsyncClient) -> None:
    _, key = world.new_account(credit=0)
    answer = await user.get("/user/balance", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["is_available"]) == (200, False)


async def test_models_need_a_valid_key_and_cost_the_ledger_nothing(world: World, user: httpx.AsyncClient) -> None:
    assert (await user.get("/models")).status_code == 200  # the limiter looks the key up once
    before = len(world.accounting.called)
    assert [(await user.get(path)).status_code for path in ("/models", "/models/svc-chat")] == [200, 200]
    assert len(world.accounting.called) == before
    wrong = await user.get("/models", headers={"authorization": f"Bearer {keys.new_key()}"})
    assert wrong.status_code == 401


async def test_few_queries_of_an_account_run_at_once_and_others_do_not_wait(
    world: World, user: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[object] = []
    slow, answer = world.account_id, asyncio.Event()
    run = world.accounting.run

    async def run_slowly(command: Any) -> Any:
        if getattr(command, "account_id", None) == slow:
            running.append(command)
            await answer.wait()
        return await run(command)

    monkeypatch.setattr(world.accounting, "run", run_slowly)
    many = [asyncio.create_task(user.get("/user/balance")) for _ in range(8)]
    _, other = world.new_account()
    served = await user.get("/user/balance", headers={"authorization": f"Bearer {other}"})
    assert (served.status_code, len(running)) == (200, AT_ONCE)
    answer.set()
    assert [one.status_code for one in await asyncio.gather(*many)] == [200] * 8


def test_the_buckets_of_queries_are_bounded() -> None:
    rates = QueryRates(clock=lambda: 0.0, most_buckets=100)
    for number in range(1000):
        rates.count(Identity(f"a{number}", f"k{number}"))
    assert len(rates._buckets) == 100
