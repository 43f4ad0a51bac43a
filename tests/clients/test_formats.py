"""Every door by the SDK that its users have: replies, streams, tools, schemas, refusals, hang-ups and counts.

The SDKs validate strictly: each body and each event must fit their types.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpClient
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.formats import (
    Answer,
    Chat,
    Completions,
    Format,
    Messages,
    Question,
    Responses,
    Result,
    System,
    Tool,
    User,
    closed,
)
from tests.clients.served import Served

FRANCE = User("Name the capital of France.")
ASKED = Question([FRANCE])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("get_weather", SCHEMA)
CLOCK = Tool(
    "get_time",
    {
        "type": "object",
        "properties": {"zone": {"type": "string", "maxLength": 8}},
        "required": ["zone"],
        "additionalProperties": False,
    },
)
FORECAST = Question([User("What is the weather in Paris?")], tools=[CLOCK, WEATHER], tool_choice="get_weather")
FORMATS = ("chat", "responses", "messages", "completions")
CONVERSATIONS = tuple(name for name in FORMATS if name != "completions")


@pytest.fixture
async def formats(service: Served, async_client: AsyncOpenAI) -> AsyncIterator[dict[str, Format]]:
    async with anthropic_client(service) as messages:
        yield {
            made.name: made
            for made in (
                Chat(async_client),
                Responses(async_client),
                Messages(messages),
                Completions(async_client),
            )
        }


def anthropic_client(service: Served) -> AsyncAnthropic:
    return AsyncAnthropic(
        api_key=service.key,
        base_url=service.url,
        max_retries=0,
        timeout=60,
        http_client=AnthropicHttpClient(verify=False),  # else each reads the certificates of authorities
        _strict_response_validation=True,
    )


async def ask(format: Format, way: str, question: Question) -> Answer:
    return await (format.whole(question) if way == "whole" else format.streamed(question))


ways = pytest.mark.parametrize("way", ["whole", "streamed"])
each = pytest.mark.parametrize("name", FORMATS)
each_conversation = pytest.mark.parametrize("name", CONVERSATIONS)


@ways
@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "chat"])
async def test_a_conversation_has_one_reply_and_one_count_through_every_door(
    formats: dict[str, Format], name: str, way: str
) -> None:
    question = dataclasses.replace(ASKED, turns=[System("Be short."), FRANCE])
    answer = await ask(formats[name], way, question)
    assert answer == await formats["chat"].whole(question)
    assert answer.end == "stop"
    assert answer.text


@ways
async def test_a_rendered_conversation_is_the_same_prompt_for_completions(
    formats: dict[str, Format], tokenizer: Any, way: str
) -> None:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": FRANCE.text}], tokenize=False, add_generation_prompt=True
    )
    answer = await ask(formats["completions"], way, dataclasses.replace(ASKED, turns=[User(rendered)]))
    assert answer == await formats["chat"].whole(ASKED)


@ways
@each
async def test_a_reply_that_is_cut_says_so(formats: dict[str, Format], name: str, way: str) -> None:
    answer = await ask(formats[name], way, dataclasses.replace(ASKED, max_tokens=3))
    assert (answer.end, answer.output_tokens) == ("length", 3)


@ways
@each_conversation
async def test_a_named_tool_is_called_and_its_result_goes_back(formats: dict[str, Format], name: str, way: str) -> None:
    called = await ask(formats[name], way, FORECAST)
    assert called.end == "calls"
    assert [call.name for call in called.calls] == ["get_weather"]
    [call] = called.calls
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    told = [*FORECAST.turns, call, Result(call.id, "Sunny, 21 degrees.")]
    plain = dataclasses.replace(FORECAST, tool_choice="none")
    answer = await ask(formats[name], way, dataclasses.replace(plain, turns=told))
    assert answer.text
    assert not answer.calls
    asked = await formats[name].whole(dataclasses.replace(plain, max_tokens=1))
    assert answer.prompt_tokens > asked.prompt_tokens + 20  # the call and its result


@ways
@each_conversation
async def test_a_required_call_fits_the_schema_of_one_of_the_tools(
    formats: dict[str, Format], name: str, way: str
) -> None:
    for temperature in (0.0, 1.0):
        question = dataclasses.replace(FORECAST, tool_choice="any", temperature=temperature, max_tokens=400)
        answer = await ask(formats[name], way, question)
        assert answer.end == "calls"
        assert len({call.id for call in answer.calls}) == len(answer.calls) > 0
        for call in answer.calls:
            tool = WEATHER if call.name == "get_weather" else CLOCK
            jsonschema.validate(json.loads(call.arguments), tool.parameters)


class Forecast(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@each_conversation
async def test_a_reply_of_a_class_is_parsed(formats: dict[str, Format], name: str) -> None:
    assert isinstance(await formats[name].parsed(dataclasses.replace(ASKED, temperature=1.0), Forecast), Forecast)


@pytest.mark.parametrize("name", ["responses", "messages"])
async def test_a_count_is_that_of_the_reply(formats: dict[str, Format], name: str) -> None:
    format = formats[name]
    assert isinstance(format, Responses | Messages)
    for question in (ASKED, FORECAST):
        assert await format.counted(question) == (await format.whole(question)).prompt_tokens


@each
async def test_a_client_that_hangs_up_leaves_its_place(service: Served, formats: dict[str, Format], name: str) -> None:
    key = service.account(concurrency=1)
    stream = await formats[name].with_key(key).begun(dataclasses.replace(ASKED, model="svc-held"))
    with pytest.raises(formats[name].errors.RateLimitError):
        await formats[name].with_key(key).whole(ASKED)
    await closed(stream)
    assert (await formats[name].with_key(key, retries=50).whole(ASKED)).text


@each
async def test_a_wrong_key_is_an_authentication_error(formats: dict[str, Format], name: str) -> None:
    format = formats[name]
    with pytest.raises(format.errors.AuthenticationError) as refused:
        await format.with_key("sk-nonsense").whole(ASKED)
    assert refused.value.request_id


@each
async def test_an_empty_account_is_a_402_that_is_not_tried_again(
    service: Served, formats: dict[str, Format], name: str
) -> None:
    format = formats[name]
    with pytest.raises(format.errors.APIStatusError) as refused:
        await format.with_key(service.account(credit=0), retries=2).whole(ASKED)
    assert refused.value.status_code == 402
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"


@each
async def test_a_spent_rate_is_a_rate_limit_error_that_says_when(
    service: Served, formats: dict[str, Format], name: str
) -> None:
    limited = formats[name].with_key(service.account(rpm=1))
    await limited.whole(ASKED)
    with pytest.raises(limited.errors.RateLimitError) as refused:
        await limited.whole(ASKED)
    assert 0 < int(refused.value.response.headers["retry-after-ms"]) <= 60_000


@each
async def test_a_service_without_a_backend_is_overloaded(formats: dict[str, Format], name: str) -> None:
    format = formats[name]
    with pytest.raises(format.errors.InternalServerError) as refused:
        await format.streamed(dataclasses.replace(ASKED, model="svc-full"))
    assert refused.value.status_code == (529 if name == "messages" else 503)


@ways
@each
async def test_a_prompt_that_is_too_long_is_the_callers_error(formats: dict[str, Format], name: str, way: str) -> None:
    format = formats[name]
    with pytest.raises((format.errors.BadRequestError, format.errors.UnprocessableEntityError)) as refused:
        await ask(format, way, dataclasses.replace(ASKED, turns=[User("harbour " * 40_000)]))
    assert "token" in refused.value.message


@each
async def test_a_wrong_type_is_a_bad_request_that_names_the_field(formats: dict[str, Format], name: str) -> None:
    format = formats[name]
    with pytest.raises(format.errors.BadRequestError) as refused:
        await format.whole(dataclasses.replace(ASKED, more={"temperature": "hot"}))
    assert "temperature" in refused.value.message


@each
async def test_a_stream_that_fails_raises_after_its_text(formats: dict[str, Format], name: str) -> None:
    format = formats[name]
    stream = await format.begun(dataclasses.replace(ASKED, model="svc-cut"))
    if name == "responses":
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
    else:
        with pytest.raises(format.errors.APIError):
            [event async for event in stream]
