"""Several choices, tool calls and reasoning: from the body to the replica, and what clients see of its events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.contracts.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChoiceEnded,
    Delta,
    Ending,
    Finished,
    FinishReason,
    Part,
    Reasoning,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
    Text,
)
from tests.gateway.connections import Call
from tests.gateway.world import PRICE_IN, PRICE_OUT, World, price, settled

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}

CACHED = 4 * PRICE_IN // 2 + 6 * PRICE_IN  # a prompt of 10 tokens, 4 of them cached

TWO_CHOICES = [
    Started(10, 4),
    ReplyParts((Text("one"),), 1, (), 0),
    ReplyParts((Text("two"),), 2, (), 1),
    ChoiceEnded(1, LENGTH),
    ReplyParts((Text(" more"),), 3, (), 0),
    ChoiceEnded(0, STOP),
    Finished(STOP, 10, 4, 3),
]


def call_parts(index: int, name: str, *pieces: str, ending: Ending = Ending.COMPLETE) -> tuple[Part, ...]:
    return (
        CallStarted(index, f"call_{index}", name),
        *(CallArguments(index, piece) for piece in pieces),
        CallEnded(index, ending),
    )


# n


async def test_a_whole_reply_has_every_choice_and_the_prompt_is_billed_once(world: World) -> None:
    world.backends.play(TWO_CHOICES)
    call = await Call(world, n=2).done()
    told = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in call.json["choices"]]
    assert told == [(0, "one more", "stop"), (1, "two", "length")]
    usage = call.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_cache_hit_tokens"]) == (10, 3, 4)
    await settled(world, requests=1, spent=CACHED + 3 * PRICE_OUT)


async def test_a_stream_opens_each_choice_once_and_ends_each_with_its_reason(world: World) -> None:
    world.backends.play(TWO_CHOICES)
    call = await Call(world, n=2, stream=True, stream_options={"include_usage": True}).done()
    seen: list[tuple[int, Any]] = []
    for event in call.events[:-1]:
        [choice] = event["choices"]
        seen.append((choice["index"], choice["finish_reason"] or choice["delta"]))
    role = {"role": "assistant", "content": ""}
    assert seen == [
        (0, role),
        (0, {"content": "one"}),
        (1, role),
        (1, {"content": "two"}),
        (1, "length"),
        (0, {"content": " more"}),
        (0, "stop"),
    ]
    assert call.events[-1]["choices"] == []
    assert call.events[-1]["usage"]["total_tokens"] == 13


async def test_all_choices_are_held_and_each_may_have_what_was_asked_for(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *TWO_CHOICES[1:]])
    call = Call(world, n=3, max_tokens=50)
    while not world.backends.calls:
        await asyncio.sleep(0)
    [asked] = world.backends.calls
    assert (asked.n, asked.sampling.max_tokens) == (3, 50)
    assert asked.credit >= 3 * 50 * PRICE_OUT
    assert world.held == asked.credit
    gate.set()
    await call.done()


async def test_a_balance_that_pays_for_no_token_of_each_choice_is_402_and_nothing_is_held(world: World) -> None:
    _, world.key = world.new_account(credit=20 * PRICE_IN + 2 * PRICE_OUT)
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=20)], TWO_CHOICES)
    call = await Call(world, n=8).done()
    assert call.status == 402
    assert "choices" in call.json["error"]["message"]
    await settled(world, requests=0, spent=0)


async def test_a_client_that_leaves_pays_for_the_tokens_of_all_choices_so_far(world: World) -> None:
    world.backends.play([*TWO_CHOICES[:3], asyncio.Event()])
    call = Call(world, n=2, stream=True)
    await call.until('"two"')
    call.hang_up()
    await call.done()
    await settled(world, requests=1, spent=CACHED + 2 * PRICE_OUT)


# Tools


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", None, True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("required", None, False)),
        ({"tool_choice": "none"}, ("none", None, True)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            ("required", "get_weather", True),
        ),
    ],
)
async def test_the_replica_receives_the_tools_and_the_tool_choice(
    world: World, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert (await Call(world, tools=[WEATHER], **fields).done()).status == 200
    [asked] = world.backends.calls
    assert (asked.tool_choice, asked.function, asked.parallel_calls) == expected
    assert [tool["function"]["name"] for tool in asked.tools] == ["get_weather"]


async def test_a_whole_reply_with_calls_has_them_apart_from_the_text(world: World) -> None:
    parts = (*call_parts(0, "get_weather", '{"city":', ' "Paris"}'), *call_parts(1, "get_time", "{}"))
    world.backends.play([Started(10, 0), ReplyParts(parts, 9), Finished(STOP, 10, 0, 9)])
    call = await Call(world, tools=[WEATHER]).done()
    [choice] = call.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
            {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ],
    }


async def test_a_streamed_call_has_its_id_and_name_once_and_its_arguments_in_pieces(world: World) -> None:
    started, first, second, ended = call_parts(0, "get_weather", '{"city":', ' "Paris"}')
    world.backends.play(
        [
            Started(10, 0),
            ReplyParts((Text("I look. "),), 2),
            ReplyParts((started, first), 5),
            ReplyParts((second, ended), 8),
            Finished(STOP, 10, 0, 8),
        ]
    )
    call = await Call(world, tools=[WEATHER], stream=True).done()
    deltas = [event["choices"][0]["delta"] for event in call.events]
    opened = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "I look. "},
        {"tool_calls": [opened]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]},
        {},
    ]
    assert call.events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ending", "reason", "expected"),
    [
        (Ending.CUT, LENGTH, "length"),
        (Ending.COMPLETE, LENGTH, "length"),
        (Ending.CUT, STOP, "length"),
        (Ending.COMPLETE, STOP, "tool_calls"),
    ],
)
async def test_only_whole_calls_that_the_model_ended_wait_for_results(
    world: World, stream: bool, ending: Ending, reason: FinishReason, expected: str
) -> None:
    parts = call_parts(0, "get_weather", '{"city"', ending=ending)
    world.backends.play([Started(10, 0), ReplyParts(parts, 4), Finished(reason, 10, 0, 4)])
    call = await Call(world, tools=[WEATHER], stream=stream).done()
    last = call.events[-1] if stream else call.json
    assert last["choices"][0]["finish_reason"] == expected


async def test_a_function_that_can_not_be_enforced_is_422_and_names_it(world: World) -> None:
    world.backends.play([Rejected(Rejection.INVALID, message="no.", param="tools[0].function.parameters")])
    call = await Call(world, tools=[WEATHER], tool_choice="required").done()
    assert (call.status, call.json["error"]["param"]) == (422, "tools[0].function.parameters")
    await settled(world, requests=0, spent=0)


# Reasoning


async def test_reasoning_is_separated_and_its_tokens_are_counted(world: World) -> None:
    script = [
        Started(10, 0),
        ReplyParts((Reasoning("Hm"),), 2),
        ReplyParts((Reasoning("."), Text("Yes")), 5),
        Finished(STOP, 10, 0, 6, marked_tokens=4),
    ]
    world.backends.play(script)
    call = await Call(world).done()
    assert call.json["choices"][0]["message"] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    assert call.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    streamed = await Call(world, stream=True).done()
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    assert deltas[1:-1] == [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}]
    await settled(world, requests=2, spent=2 * price(10, 6))


async def test_plain_text_looks_the_same_in_one_part_and_in_several(world: World) -> None:
    bodies = []
    for said in (Delta("Hi", 1), ReplyParts((Text("Hi"),), 1)):
        world.backends.play([Started(10, 0), said, Finished(STOP, 10, 0, 1)])
        bodies.append((await Call(world).done()).json["choices"])
    assert bodies[0] == bodies[1]
