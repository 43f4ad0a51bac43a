"""A first call: the official SDK, a real model, exact counts and exact money."""

from __future__ import annotations

import pytest

from tests.service.harness import FRANCE, PRICE_IN, PRICE_OUT, Service, charge, nano

pytestmark = pytest.mark.service


@pytest.mark.parametrize(("base", "stream"), [("", False), ("/v1", True)])
def test_the_sdk_gets_a_true_answer_with_exact_usage_and_an_exact_bill(
    service: Service, base: str, stream: bool
) -> None:
    account = service.account("first call")
    before = account.nano
    client = account.client(base_url=service.base_url + base)
    if stream:
        chunks = list(
            client.chat.completions.create(
                model="svc-chat",
                messages=FRANCE,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        assert not chunks[-1].choices
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert len({chunk.created for chunk in chunks}) == 1
    else:
        reply = client.chat.completions.create(model="svc-chat", messages=FRANCE, temperature=0)
        text, usage = reply.choices[0].message.content, reply.usage
        assert reply.choices[0].finish_reason == "stop"
        assert reply.model == "svc-chat"
    assert "Paris" in text
    assert usage.prompt_tokens == service.prompt_tokens(FRANCE)
    assert usage.completion_tokens == service.reply_tokens(text)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    view = account.settled(1)
    assert before - nano(view["balance"]) == charge(usage)
    assert nano(view["usage"]["charged"]) == charge(usage)

    (row,) = service.cli("usage", "--account", account.id, "--group-by", "model")["data"]
    assert row["model"] == "svc-chat"
    assert row["prompt_tokens"] == usage.prompt_tokens
    assert row["completion_tokens"] == usage.completion_tokens
    assert nano(row["charged"]) == charge(usage)


def test_a_message_is_counted_before_and_billed_alike_after(service: Service) -> None:
    account = service.account("messages")
    headers = {"x-api-key": account.key, "anthropic-version": "2023-06-01"}
    fields = {"model": "svc-chat", "messages": FRANCE}
    counted = service.http.post("/v1/messages/count_tokens", json=fields, headers=headers).json()["input_tokens"]
    tokens = service.http.post("/tokenize", json=fields, headers=headers).json()
    assert counted == tokens["count"] == service.prompt_tokens(FRANCE)
    text = service.http.post("/detokenize", json={"model": "svc-chat", "tokens": tokens["tokens"]}, headers=headers)
    assert FRANCE[-1]["content"] in text.json()["prompt"]
    reply = service.http.post("/v1/messages", json={**fields, "max_tokens": 2, "temperature": 0}, headers=headers)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    usage = reply.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert (reply.json()["stop_reason"], usage["output_tokens"]) == ("max_tokens", 2)
    assert account.settled(1)["usage"]["requests"] == 1


def test_the_output_is_capped_where_the_balance_ends(service: Service) -> None:
    prompt = service.prompt_tokens(FRANCE)
    nano_units = prompt * PRICE_IN + 4 * PRICE_OUT + 1
    account = service.account("small change", credit=f"0.{nano_units:09d}")
    reply = account.client().chat.completions.create(model="svc-chat", messages=FRANCE, temperature=0)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4
    assert reply.choices[0].finish_reason == "length"
    assert nano(account.settled(1)["balance"]) == 1


def test_the_models_and_the_balance_can_be_read(service: Service) -> None:
    account = service.account("reader", credit="1.5")
    client = account.client()
    names = [model.id for model in client.models.list()]
    assert names[:2] == ["svc-chat", "svc-coder"]
    assert client.models.retrieve("svc-chat").model_dump()["context_length"] == 32768
    headers = {"authorization": f"Bearer {account.key}"}
    balance = service.http.get("/user/balance", headers=headers).json()
    assert balance["is_available"] is True
    assert nano(balance["balance_infos"][0]["total_balance"]) == nano("1.5")
    client.chat.completions.create(model="svc-chat", messages=FRANCE, temperature=0, max_tokens=2)
    account.settled(1)
    usage = service.http.get("/v1/user/usage", params={"group_by": "model"}, headers=headers).json()
    assert usage["data"][0]["completion_tokens"] == 2


def test_every_response_has_a_request_id_and_the_limits_in_force(service: Service) -> None:
    account = service.account("headers", rpm=50)
    answer = service.http.post(
        "/chat/completions",
        json={"model": "svc-chat", "messages": FRANCE, "max_tokens": 1},
        headers={"authorization": f"Bearer {account.key}", "x-request-id": "my-own-id"},
    )
    assert answer.headers["x-request-id"] == "my-own-id"
    assert answer.headers["x-ratelimit-limit-requests"] == "50"
    assert answer.headers["x-ratelimit-remaining-requests"] == "49"
    assert service.http.get("/nowhere").headers["x-request-id"]
    for not_kept in ("", "x" * 129, b"\xff"):
        [made] = service.http.get("/nowhere", headers={"x-request-id": not_kept}).headers.get_list("x-request-id")
        assert made.startswith("req_"), not_kept
