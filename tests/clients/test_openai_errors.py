"""Errors through OpenAI's Python SDK: its classes, its retries, its raw responses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.capable import capable_engine
from tests.clients.served import Served, serve
from tests.clients.ways import QUESTION
from tests.gateway.world import until

HELD: dict[str, Any] = {"model": "svc-held", "messages": QUESTION}
LONG = [{"role": "user", "content": "harbour " * 40_000}]
REFUSED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], int, str, str | None]] = {
    "a wrong type": ({"temperature": "hot"}, openai.BadRequestError, 400, "invalid_format", "temperature"),
    "no messages": ({"messages": None}, openai.BadRequestError, 400, "invalid_format", "messages"),
    "out of range": ({"temperature": 3}, openai.UnprocessableEntityError, 422, "invalid_parameter", "temperature"),
    "too many": ({"n": 9}, openai.UnprocessableEntityError, 422, "invalid_parameter", "n"),
    "an unknown model": ({"model": "gpt-4"}, openai.UnprocessableEntityError, 422, "model_not_found", "model"),
    "an unknown role": (
        {"messages": [{"role": "king", "content": "Hi"}]}, openai.UnprocessableEntityError, 422, "invalid_parameter",
        "messages[0].role",
    ),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        openai.UnprocessableEntityError, 422, "invalid_parameter", "messages[0].content[0].type",
    ),
    "too long": (
        {"messages": LONG}, openai.UnprocessableEntityError, 422, "context_length_exceeded", "messages",
    ),
    "no backend": ({"model": "svc-full"}, openai.InternalServerError, 503, "overloaded_error", None),
    "a fault": ({"model": "svc-broken"}, openai.InternalServerError, 500, "server_error", None),
}  # fmt: skip


@pytest.fixture
def make(client: OpenAI) -> Any:
    """Makes clients with another key or other options; they share the connections of one."""

    def with_options(key: str, **options: Any) -> OpenAI:
        return client.with_options(api_key=key, **options, _extra_kwargs={"_strict_response_validation": True})

    return with_options


@pytest.fixture(scope="module")
def pausing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that begins to answer before the model does."""
    with serve(tmp_path_factory.mktemp("pausing"), capable_engine, early_reply_s=0.01) as running:
        yield running


def fields(**given: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "messages": QUESTION, "max_tokens": 2, "temperature": 0, **given}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_of_the_right_class_and_says_which_field(service: Served, client: OpenAI, name: str) -> None:
    if name == "no backend":
        assert service.world, "only here a backend can be without a replica"
    given, kind, status, code, param = REFUSED[name]
    for stream in (False, True):
        with pytest.raises(kind) as refused:
            client.chat.completions.create(**fields(**given, stream=stream))
        error = refused.value
        assert (error.status_code, error.code, error.param) == (status, code, param)
        assert set(error.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
        assert error.request_id


async def test_the_async_client_raises_the_same_refusal(async_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=r"This model's maximum context length is \d+ tokens"):
        await async_client.chat.completions.create(**fields(messages=LONG))


def test_a_wrong_key_is_an_authentication_error(make: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        make("sk-nonsense").chat.completions.create(**fields())
    assert refused.value.code == "invalid_api_key"


def test_an_empty_account_is_a_plain_402_that_is_not_tried_again(service: Served, make: Any) -> None:
    key = service.account(credit=0)
    refusals = service.world.metrics.refusals
    before = len(refusals)
    with pytest.raises(openai.APIStatusError) as refused:
        make(key, max_retries=2).chat.completions.create(**fields())
    assert type(refused.value) is openai.APIStatusError
    assert (refused.value.status_code, refused.value.code) == (402, "insufficient_balance")
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"
    service.run(until(lambda: len(refusals) > before))  # counted once the reply has been sent
    assert refusals[before:] == ["insufficient_balance"]


def test_a_spent_rate_is_a_rate_limit_error_that_says_when(service: Served, make: Any) -> None:
    client = make(service.account(rpm=1))
    client.chat.completions.create(**fields())
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**fields())
    headers = refused.value.response.headers
    assert refused.value.code == "requests"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert 0 < int(headers["retry-after-ms"]) <= 60_000
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_the_sdk_waits_for_retry_after_and_retries_until_there_is_room(service: Served, make: Any) -> None:
    refusals = service.world.metrics.refusals
    before = len(refusals)
    key = service.account(concurrency=1)
    running = make(key).chat.completions.create(**HELD, stream=True)
    next(iter(running))

    async def free() -> None:
        await until(lambda: "concurrency" in refusals[before:], 60)
        running.response.close()

    freed = threading.Thread(target=service.run, args=(free(),))
    freed.start()
    reply = make(key, max_retries=50).chat.completions.create(**fields())
    freed.join(60)
    assert reply.choices[0].message.content
    assert "concurrency" in refusals[before:]


def test_a_service_without_a_backend_is_tried_as_often_as_set(
    service: Served, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(time=time.time, sleep=slept.append))

    def asked() -> list[int]:
        # By the model: a reply to an earlier request may be counted now.
        return [status for model, status in service.world.metrics.requests if model == "svc-full"]

    before = len(asked())
    with pytest.raises(openai.InternalServerError) as refused:
        make(service.key, max_retries=1).chat.completions.create(**fields(model="svc-full"))
    assert slept == [int(refused.value.response.headers["retry-after-ms"]) / 1000]

    async def counted() -> None:
        await until(lambda: len(asked()) >= before + 2, 60)  # a request is counted when its reply is out

    service.run(counted())
    assert asked()[before:] == [503, 503]


def test_the_models_can_be_listed_and_read(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()][:2] == ["svc-chat", "svc-coder"]
    model = client.models.retrieve("svc-chat").model_dump()
    assert (model["context_length"], model["max_output_length"]) == (32768, 4096)
    assert model["recommended_temperatures"]["translation"] == 1.1
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


async def test_the_models_can_be_listed_async(async_client: AsyncOpenAI) -> None:
    assert "svc-coder" in [model.id async for model in async_client.models.list()]


def test_an_endpoint_that_is_not_served_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model="svc-chat", input="Hi")
    assert refused.value.code == "not_found"


def test_a_raw_answer_has_the_headers_and_the_reply(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**fields(), extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert int(raw.headers["x-ratelimit-remaining-requests"]) < int(raw.headers["x-ratelimit-limit-requests"])
    assert raw.headers["server-timing"]
    reply = raw.parse()
    assert reply._request_id == "mine-1"
    assert reply.choices[0].message.content


def test_a_streaming_answer_can_be_read_line_by_line(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(**fields(stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_an_answer_that_begins_early_is_read_whole(pausing: Served, async_client: AsyncOpenAI) -> None:
    client = async_client.with_options(api_key=pausing.key, base_url=pausing.base_url)
    async with client.chat.completions.with_streaming_response.create(**HELD) as answer:
        pausing.release()
        raw = await answer.read()
        reply = await answer.parse()
    assert raw.startswith(b"\n")
    assert reply.choices[0].message.content == "Wait."
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2


def test_a_stream_is_read_over_its_comments(pausing: Served, make: Any) -> None:
    client = make(pausing.key, base_url=pausing.base_url)
    with client.chat.completions.with_streaming_response.create(**HELD, stream=True) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith(":"))
        pausing.release()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    stream = client.chat.completions.create(**HELD, stream=True)
    text = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
    pausing.release()
    assert text + "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Wait."


def test_a_retry_with_the_same_key_gets_the_same_reply_and_is_not_billed(service: Served, client: OpenAI) -> None:
    given = fields(extra_headers={"idempotency-key": "once"}, temperature=1.5)
    first = client.chat.completions.create(**given)
    again = client.chat.completions.with_raw_response.create(**given)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.parse().id == first.id
