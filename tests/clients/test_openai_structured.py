"""Structured output through the helpers of OpenAI's Python SDK: pydantic models in, parsed objects out."""

from __future__ import annotations

from typing import Annotated, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

ASKED: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Describe a dog as JSON."}]


class Leg(BaseModel):
    side: Literal["left", "right"]
    length_cm: Annotated[int, Field(ge=1, le=99)]


class Animal(BaseModel):
    kind: Literal["dog", "cat"]
    tame: bool
    legs: Annotated[list[Leg], Field(min_length=1, max_length=2)]
    owner: Literal["Ada", "Bob"] | None


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_reply_is_parsed_into_the_model_that_was_asked_for(client: OpenAI, temperature: float) -> None:
    reply = client.chat.completions.parse(
        model="svc-chat", messages=ASKED, response_format=Animal, temperature=temperature, seed=3
    )
    assert isinstance(reply.choices[0].message.parsed, Animal)


async def test_a_reply_is_parsed_async_too(async_client: AsyncOpenAI) -> None:
    reply = await async_client.chat.completions.parse(
        model="svc-chat", messages=ASKED, response_format=Animal, n=2, seed=3
    )
    assert [type(choice.message.parsed) for choice in reply.choices] == [Animal, Animal]


def test_the_stream_helper_shows_the_object_as_it_grows(client: OpenAI) -> None:
    with client.chat.completions.stream(model="svc-chat", messages=ASKED, response_format=Animal, seed=3) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "content.delta"]
    [done] = [event for event in events if event.type == "content.done"]
    assert isinstance(done.parsed, Animal)
    assert "".join(event.delta for event in deltas) == done.content
    assert isinstance(deltas[-1].parsed, dict)


async def test_the_stream_helper_works_async_and_for_plain_text(async_client: AsyncOpenAI) -> None:
    async with async_client.chat.completions.stream(
        model="svc-chat", messages=[{"role": "user", "content": "Name the capital of France."}], temperature=0
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    [done] = [event for event in events if event.type == "content.done"]
    assert final.choices[0].message.content == done.content != ""


def test_an_object_that_was_cut_is_an_error_of_its_own(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="svc-chat", messages=ASKED, response_format=Animal, max_tokens=3)


def test_a_schema_that_cannot_be_enforced_is_refused_and_names_the_keyword(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(
            model="svc-chat",
            messages=ASKED,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        )
    assert "uniqueItems" in refused.value.message
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", "response_format")
