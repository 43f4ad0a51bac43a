"""Tools through OpenAI's Python SDK with strict validation: streamed and not, sync and async, and its own helpers.

Calls are forced: the bundled model is too small to choose well, and what is forced is held to by a grammar.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients.ways import Ask, Call, Choice

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 8}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]


def tools(strict: bool | None = None) -> list[dict[str, Any]]:
    more = {} if strict is None else {"strict": strict}
    return [
        {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema, **more}}
        for name, schema in SCHEMAS.items()
    ]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def valid(choice: Choice) -> list[Call]:
    """The calls of a choice that ended with calls; each fits its schema, each has an id of its own."""
    assert choice.finish_reason == "tool_calls"
    assert choice.calls
    assert len({call.id for call in choice.calls}) == len(choice.calls)
    for call in choice.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return choice.calls


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_required_call_fits_the_schema_of_one_of_the_tools(ask: Ask, temperature: float) -> None:
    reply = await ask(messages=ASKED, tools=tools(), tool_choice="required", temperature=temperature, seed=4)
    valid(reply.choices[0])
    assert reply.choices[0].content == ""
    assert reply.usage.completion_tokens > 5


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_named_function_is_the_one_that_is_called(ask: Ask, name: str) -> None:
    reply = await ask(messages=ASKED, tools=tools(strict=True), tool_choice=named(name), temperature=1, seed=1)
    assert [call.name for call in valid(reply.choices[0])] == [name]


async def test_without_parallel_calls_there_is_one(ask: Ask) -> None:
    for seed in range(3):
        reply = await ask(
            messages=ASKED, tools=tools(), tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
        )
        assert len(valid(reply.choices[0])) == 1


async def test_a_call_that_is_cut_says_length(ask: Ask) -> None:
    reply = await ask(messages=ASKED, tools=tools(), tool_choice=named("get_weather"), temperature=0, max_tokens=12)
    assert reply.choices[0].finish_reason == "length"


async def test_with_auto_the_finish_reason_fits_the_reply(ask: Ask) -> None:
    reply = await ask(messages=ASKED, tools=tools(strict=True), temperature=0, max_tokens=60)
    [choice] = reply.choices
    if choice.calls:
        assert choice.finish_reason in ("tool_calls", "length")
    else:
        assert choice.finish_reason in ("stop", "length")
        assert choice.content


async def test_every_choice_has_calls_of_its_own(ask: Ask) -> None:
    reply = await ask(messages=ASKED, tools=tools(), tool_choice=named("get_weather"), n=2, seed=9)
    ids = [call.id for choice in reply.choices for call in valid(choice)]
    assert len(set(ids)) == len(ids) == 2


async def test_results_go_back_with_the_calls_that_they_answer(ask: Ask) -> None:
    first = await ask(messages=ASKED, tools=tools(), tool_choice=named("get_weather"), temperature=0)
    [call] = valid(first.choices[0])
    said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    told = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    reply = await ask(messages=told, tools=tools(), tool_choice="none", temperature=0, max_tokens=40)
    assert reply.choices[0].content
    assert not reply.choices[0].calls
    asked = await ask(messages=ASKED, temperature=0, max_tokens=1)
    assert reply.usage.prompt_tokens > asked.usage.prompt_tokens + 20  # the call and its result


@pytest.mark.parametrize("function", [{"name": "now"}, {"name": "now", "parameters": None}])
async def test_a_function_without_parameters_is_called_with_none(ask: Ask, function: dict[str, Any]) -> None:
    bare = {"type": "function", "function": function}
    choice = named("now")
    [reply] = (await ask(messages=ASKED, tools=[bare], tool_choice=choice, temperature=1.5, seed=1)).choices
    assert [(call.name, call.arguments) for call in reply.calls] == [("now", "{}")]


def test_arguments_come_in_pieces_while_they_are_written(client: OpenAI) -> None:
    long = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 10}}}
    long |= {"required": ["n"]}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": long}}
    stream = client.chat.completions.create(
        model="svc-chat",
        messages=[{"role": "user", "content": "Add 1 to 10."}],
        tools=[tool],
        tool_choice="required",
        temperature=0,
        stream=True,
        max_tokens=60,
    )
    pieces = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 3
    assert [call.index for call in pieces] == [0] * len(pieces)


class GetWeather(BaseModel):
    """The weather of the coming days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]
    unit: Literal["celsius", "fahrenheit"] | None


def test_a_pydantic_tool_comes_back_parsed(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="svc-chat",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = reply.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_the_stream_helper_reports_calls_as_they_arrive_and_parses_them(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="svc-chat",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert isinstance(done.parsed_arguments, GetWeather)
    [call] = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == done.parsed_arguments
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
