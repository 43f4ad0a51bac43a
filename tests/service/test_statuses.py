"""Each status of the contract, produced by its cause over HTTP; each message says what to change."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from serve_app.contracts.key_format import new_key
from tests.service.harness import FRANCE, HELD, Service, until
from tests.service.replies import PLACES, SECRET

pytestmark = pytest.mark.service


def post(service: Service, key: str, **options: Any) -> httpx.Response:
    return service.http.post("/chat/completions", headers={"authorization": f"Bearer {key}"}, **options)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    return error


def test_400_names_what_is_malformed(service: Service) -> None:
    error = error_of(post(service, service.first_key, content=b'{"model": "svc-chat", "messages": "hello"}'), 400)
    assert "messages" in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_format")


def test_401_without_a_header_with_a_wrong_key_and_with_a_revoked_one(service: Service) -> None:
    body = {"model": "svc-chat", "messages": FRANCE, "max_tokens": 1}
    answer = service.http.post("/chat/completions", json=body)
    error_of(answer, 401)
    assert answer.headers["www-authenticate"].startswith("Bearer")

    error_of(post(service, "sk-nonsense", json=body), 401)
    error_of(post(service, new_key(), json=body), 401)
    # A wrong key is reported before a wrong body.
    error_of(post(service, new_key(), content=b"{broken"), 401)

    account = service.account("revoked")
    assert post(service, account.key, json=body).status_code == 200
    key_id = service.admin("GET", f"/admin/accounts/{account.id}/keys")["data"][0]["id"]
    service.admin("DELETE", f"/admin/keys/{key_id}")
    until(lambda: post(service, account.key, json=body).status_code == 401)


def test_401_for_a_suspended_account_until_it_is_resumed(service: Service) -> None:
    account = service.account("suspended")
    service.admin("POST", f"/admin/accounts/{account.id}/suspend")
    until(lambda: service.chat(account.key, max_tokens=1).status_code == 401)
    service.admin("POST", f"/admin/accounts/{account.id}/resume")
    until(lambda: service.chat(account.key, max_tokens=1).status_code == 200)


def test_402_when_the_balance_is_spent(service: Service) -> None:
    account = service.account("poor", credit=None)
    error = error_of(service.chat(account.key), 402)
    assert error["type"] == "insufficient_balance"
    assert "fund" in error["message"]
    # Enough for something, but not for this prompt and one token: the exact count decides.
    few = service.account("a little", credit="0.000001")
    error = error_of(service.chat(few.key), 402)
    assert few.settled(0)["usage"]["requests"] == 0


@pytest.mark.parametrize(
    ("change", "param", "code", "says"),
    [
        ({"model": "gpt-9"}, "model", "model_not_found", "svc-chat"),
        ({"temperature": 3}, "temperature", "invalid_parameter", "2"),
    ],
)
def test_422_names_the_field_and_its_range(
    service: Service, change: dict[str, Any], param: str, code: str, says: str
) -> None:
    error = error_of(service.chat(service.first_key, **change), 422)
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


def test_422_for_a_prompt_longer_than_the_context_is_not_billed(service: Service) -> None:
    account = service.account("long prompt", rpm=1)  # the model's work to find that out counts as a request
    error = error_of(service.chat(account.key, [{"role": "user", "content": "word " * 40_000}]), 422)
    assert "This model's maximum context length is 32768 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert service.chat(account.key, max_tokens=1).status_code == 429
    assert account.settled(0)["usage"]["requests"] == 0


def test_429_for_requests_per_minute_and_a_refused_request_consumes_nothing(service: Service) -> None:
    account = service.account("rpm", rpm=1)
    answers = [service.chat(account.key, max_tokens=1) for _ in range(2)]
    assert answers[0].status_code == 200
    error = error_of(answers[1], 429)
    assert error["code"] == "requests"
    wait = int(answers[1].headers["retry-after"])
    assert 1 <= wait <= 60
    assert 0 < int(answers[1].headers["retry-after-ms"]) <= wait * 1000
    assert "1" in error["message"]
    assert account.settled(1)["usage"]["requests"] == 1


def test_429_for_tokens_per_minute(service: Service) -> None:
    account = service.account("tpm", tpm=60)
    answers = [service.chat(account.key, max_tokens=30) for _ in range(3)]
    assert answers[0].status_code == 200
    assert error_of(answers[-1], 429)["code"] == "tokens"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60


async def test_429_for_concurrency(service: Service) -> None:
    account = service.account("concurrency", concurrency=1)
    async with service.async_client(account.key) as client:
        with service.hold() as hold:
            stream = await client.chat.completions.create(model=HELD, messages=hold.messages, stream=True, max_tokens=8)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="svc-chat", messages=FRANCE, max_tokens=1)
        assert caught.value.code == "concurrency"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert [chunk async for chunk in stream]
    await asyncio.to_thread(until, lambda: service.chat(account.key, max_tokens=1).status_code == 200)


def test_500_shows_nothing_of_the_inside(service: Service) -> None:
    account = service.account("fault")
    for stream in (False, True):
        answer = service.chat(account.key, model="svc-broken", stream=stream)
        error = error_of(answer, 500)
        assert error["type"] == "server_error"
        assert SECRET not in answer.text
        assert "Traceback" not in answer.text
    view = account.settled(2)
    assert view["usage"]["charged"] in ("0", "0.00")


def test_a_fault_in_mid_stream_is_an_error_event_without_done_and_its_text_is_billed(service: Service) -> None:
    account = service.account("late fault")
    answer = service.chat(account.key, [{"role": "user", "content": "late"}], model="svc-broken", stream=True)
    assert answer.status_code == 200
    events = [line for line in answer.text.splitlines() if line]
    assert '"error"' in events[-1]
    assert "[DONE]" not in answer.text
    assert SECRET not in answer.text
    assert account.settled(1)["usage"]["charged"] == "0.00000409"  # 7 tokens of prompt, 2 of text that was sent


async def test_503_when_a_replica_has_no_place_consumes_nothing(service: Service) -> None:
    account = service.account("queue")
    streams: list[Any] = []

    async def take_places(client: openai.AsyncOpenAI, messages: Any) -> None:
        while len(streams) <= 2 * PLACES:
            streams.append(
                await client.chat.completions.create(model=HELD, messages=messages, stream=True, max_tokens=4)
            )

    async with service.async_client(account.key) as client:
        with service.hold() as hold, pytest.raises(openai.InternalServerError) as caught:
            await take_places(client, hold.messages)
        answer = caught.value.response
        assert error_of(answer, 503)["type"] == "overloaded_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        for stream in streams:
            assert [chunk async for chunk in stream]
    assert len(streams) >= PLACES
    view = await asyncio.to_thread(account.settled, len(streams))
    assert view["usage"]["requests"] == len(streams)


def test_unknown_routes_and_methods_answer_json(service: Service) -> None:
    error_of(service.http.get("/v2/nothing"), 404)
    answer = service.http.get("/chat/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(service.http.get("/admin/accounts", headers={"authorization": f"Bearer {service.first_key}"}), 401)


def test_health_and_readiness_need_no_key(service: Service) -> None:
    assert service.http.get("/health").status_code == 200
    assert service.http.get("/v1/ready").status_code == 200
