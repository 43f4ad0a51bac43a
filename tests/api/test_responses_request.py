"""A request to POST /responses becomes the chat request with the same meaning; each fault names its own field."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from serve_app.api.errors import ApiError
from tests.api.responses import CUSTOM, DOOR, FUNCTION, NAMESPACE, SERVED, parsed, refusal

CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "seen"}
CHAT_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "Hi"}


def test_a_string_is_the_users_message_after_the_instructions() -> None:
    assert parsed(input="Hi", instructions="Be brief.").messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )


def test_instructions_and_the_first_system_items_are_one_message() -> None:
    items = [{"role": "developer", "content": "Two."}, {"role": "system", "content": "Three."}, USER]
    messages = parsed(input=[*items, {"role": "system", "content": "Four."}], instructions="One.").messages
    assert messages[0] == {"role": "system", "content": "One.\n\nTwo.\n\nThree."}
    assert [message["role"] for message in messages] == ["system", "user", "system"]


def test_parts_of_a_message_are_joined_and_refusals_are_text() -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refused = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    items = [{"role": "user", "content": content}, {"type": "message", "role": "assistant", "content": refused}]
    assert [message["content"] for message in parsed(input=items).messages] == ["a\nb", "c\nd"]


def test_reasoning_text_and_parallel_calls_of_one_turn_are_one_message_and_results_keep_their_order() -> None:
    second = CALL | {"call_id": "2"}
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        CALL,
        second,
        OUTPUT,
        OUTPUT | {"call_id": "2", "output": [{"type": "input_text", "text": "nothing"}]},
        {"role": "assistant", "content": "Done."},
    ]
    assert parsed(input=items).messages[1:] == (
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "2"}],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
        {"role": "tool", "content": "nothing", "tool_call_id": "2"},
        {"role": "assistant", "content": "Done."},
    )


def test_calls_after_results_are_a_new_turn() -> None:
    items = [USER, CALL, OUTPUT, CALL | {"call_id": "2"}, OUTPUT | {"call_id": "2"}]
    assert [message["role"] for message in parsed(input=items).messages] == [
        "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip


def test_a_summary_stands_for_reasoning_without_content_and_reasoning_alone_is_no_message() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert parsed(input=[USER, thought, CALL]).messages[1]["reasoning_content"] == "In short."
    assert parsed(input=[USER, thought, USER]).messages == (USER, USER)
    assert parsed(input=[USER, thought]).messages == (USER,)


def test_custom_tools_are_functions_with_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
    ]
    chat = parsed(input=items, tools=[CUSTOM | {"format": grammar}])
    [tool] = chat.tools
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert 'start: "x"' in tool["function"]["description"]
    [call] = chat.messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"input": 'a "b"'}
    assert chat.messages[2] == {"role": "tool", "content": "ok", "tool_call_id": "1"}


def test_functions_of_a_namespace_have_its_name_in_front_in_tools_and_in_earlier_calls() -> None:
    chat = parsed(input=[USER, CALL | {"namespace": "mcp__files"}], tools=[FUNCTION, NAMESPACE])
    assert [tool["function"]["name"] for tool in chat.tools] == ["look", "mcp__files__look"]
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__files__look"
    long = NAMESPACE | {"name": "n" * 60}
    [tool] = parsed(tools=[long]).tools
    assert len(tool["function"]["name"]) == 64


def test_tools_that_run_elsewhere_are_left_out_and_named() -> None:
    chat = parsed(tools=[{"type": "web_search"}, FUNCTION, {"type": "local_shell"}, {"type": "web_search"}])
    assert [tool["function"]["name"] for tool in chat.tools] == ["look"]
    assert chat.tool_names.omitted == ["web_search", "local_shell"]
    assert parsed(tools=[{"type": "web_search"}], tool_choice="auto").tools == ()


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


LOOK = {"type": "function", "name": "look"}


@pytest.mark.parametrize(
    ("choice", "names", "meant", "forced"),
    [
        (None, ["look", "patch", "mcp__files__look"], "auto", None),
        ("none", ["look", "patch", "mcp__files__look"], "none", None),
        ("required", ["look", "patch", "mcp__files__look"], "required", None),
        (LOOK, ["look", "patch", "mcp__files__look"], "required", "look"),
        (LOOK | {"namespace": "mcp__files"}, ["look", "patch", "mcp__files__look"], "required", "mcp__files__look"),
        ({"type": "custom", "name": "patch"}, ["look", "patch", "mcp__files__look"], "required", "patch"),
        (allowed("auto", LOOK), ["look"], "auto", None),
        (allowed("required", LOOK, {"type": "custom", "name": "patch"}), ["look", "patch"], "required", None),
        (allowed("auto", {"type": "web_search"}), ["look", "patch", "mcp__files__look"], "none", None),
    ],
)
def test_a_tool_choice_means_the_same_as_in_the_chat_format(
    choice: Any, names: list[str], meant: str, forced: str | None
) -> None:
    chat = parsed(tools=[FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in chat.tools] == names
    assert (chat.tool_choice, chat.forced_function) == (meant, forced)


def test_fields_have_the_meaning_of_their_counterparts() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = parsed(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100_000,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        parallel_tool_calls=False,
        stream=True,
        seed=7,
        text={"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}, "verbosity": "low"},
    )
    assert (chat.temperature, chat.top_p, chat.max_tokens, chat.seed, chat.stream) == (0.5, 0.9, 100_000, 7, True)
    assert (chat.logprobs, chat.top_logprobs, chat.parallel_tool_calls) == (True, 2, False)
    expected = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    assert chat.response_format == expected
    assert not parsed().logprobs
    assert parsed(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}


def test_fields_that_change_nothing_are_accepted() -> None:
    parsed(
        store=False,
        user="ada",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        client_metadata={"x": "y"},
        max_tool_calls=3,
        truncation="auto",
        reasoning={"effort": "high", "summary": "auto"},
        metadata={"team": "blue"},
        stream_options={"include_obfuscation": True},
        include=[],
        prompt=None,
        conversation=None,
    )


IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"input": None}, 400, "input", "missing"),
        ({"input": 5}, 400, "input", "a string or an array of items"),
        ({"input": [5]}, 400, "input[0]", "an object"),
        ({"input": [CALL | {"arguments": {}}]}, 400, "input[0].arguments", "a string"),
        ({"input": [{"type": 5}]}, 400, "input[0].type", "a string"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].name", "missing"),
        ({"tools": [5]}, 400, "tools[0]", "an object"),
        ({"metadata": {"a": 1}}, 400, "metadata.a", "a string"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.name", "missing"),
        ({"seed": "x"}, 400, "seed", "an integer"),
        ({"model": "other"}, 422, "model", "does not exist"),
        ({"input": []}, 422, "input", "at least one item"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, 422, "input[0].type", "web_search_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, 422, "input[0].role", "robot"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, 422, "input[0].content[0].type", "only text"),
        ({"input": [OUTPUT | {"output": [IMAGE]}]}, 422, "input[0].output[0].type", "only text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 422, "input[0].id", "not stored"),
        ({"max_output_tokens": 0}, 422, "max_output_tokens", "at least 1"),
        ({"temperature": 2.5}, 422, "temperature", "from 0 to 2"),
        ({"top_logprobs": 21}, 422, "top_logprobs", "from 0 to 20"),
        ({"include": ["x"]}, 422, "include[0]", "must be one of"),
        ({"metadata": {str(n): "" for n in range(17)}}, 422, "metadata", "at most 16"),
        ({"metadata": {"a": "x" * 513}}, 422, "metadata.a", "512"),
        *(({name: "x" * 513}, 422, name, "512") for name in ("user", "safety_identifier", "prompt_cache_key")),
        ({"text": {"verbosity": "x" * 513}}, 422, "text.verbosity", "512"),
        ({"reasoning": {"summary": "x" * 513}}, 422, "reasoning.summary", "512"),
        ({"metadata": {"a" * 65: "x"}}, 422, "metadata", "64"),
        ({"reasoning": {"effort": "some"}}, 422, "reasoning.effort", "high"),
        ({"truncation": "middle"}, 422, "truncation", "auto or disabled"),
        ({"text": {"format": {"type": "grammar"}}}, 422, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, 422, "text.format.name", "a b"),
        ({"tools": [FUNCTION, FUNCTION]}, 422, "tools[1].name", "must not repeat"),
        ({"tools": [{"type": "web_search"}, FUNCTION | {"name": "a b"}]}, 422, "tools[1].name", "a b"),
        ({"tools": [NAMESPACE | {"tools": [FUNCTION, FUNCTION]}]}, 422, "tools[0].tools[1].name", "must not repeat"),
        ({"tools": [FUNCTION] * 129}, 422, "tools", "at most 128"),
        ({"tool_choice": "always"}, 422, "tool_choice", "none, auto, required"),
        ({"tool_choice": "required"}, 422, "tool_choice", "'required' without tools"),
        ({"tool_choice": "required", "tools": [{"type": "mcp"}]}, 422, "tool_choice", "mcp"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, 422, "tool_choice.type", "web_"),
        ({"tool_choice": LOOK}, 422, "tool_choice.name", "look"),
        ({"tool_choice": allowed("required", {"type": "mcp"})}, 422, "tool_choice.tools[0]", "mcp"),
        ({"tool_choice": allowed("never")}, 422, "tool_choice.mode", "auto or required"),
        ({"conversation": "conv_1"}, 422, "conversation", "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, 422, "prompt", "instructions"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id", "not stored"),
        ({"stream_options": {"resume": True}}, 422, "stream_options.resume", "stream: true"),
    ],
)
def test_each_fault_names_its_field(fields: dict[str, Any], status: int, param: str, words: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (status, param)
    assert words in error.message


def test_a_crowd_of_items_is_refused_before_they_are_read() -> None:
    assert refusal(input=[{}] * 40_000).code == "context_length_exceeded"
    assert refusal(input=[{"role": "user", "content": [{}] * 40_000}]).code == "context_length_exceeded"


def test_thousands_of_items_are_joined_in_linear_time() -> None:
    began = time.process_time()
    for item in ({"role": "assistant", "content": "x" * 200}, {"role": "system", "content": "x"}):
        body = {"model": "svc-chat", "input": [USER, *[item] * 15_000]}
        with contextlib.suppress(ApiError):
            DOOR.parse(json.dumps(body).encode(), SERVED, 2**22, 10**5)
    assert time.process_time() - began < 2  # seconds; each took longer when each item copied what came before


def test_custom_formats_and_allowed_tools_are_bounded() -> None:
    tools = [CUSTOM | {"name": name, "format": {"definition": "x" * 70_000}} for name in ("a", "b")]
    parsed(tools=tools[:1])
    error = refusal(tools=tools)
    assert (error.status, error.param) == (422, "tools[1].format")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}] * 129}
    error = refusal(tools=[FUNCTION], tool_choice=choice)
    assert (error.status, error.param) == (422, "tool_choice.tools")


@pytest.mark.parametrize(("field", "value"), [("name", "n" * 257), ("description", "d" * 16_385)])
def test_texts_that_each_tool_of_a_namespace_repeats_are_short(field: str, value: str) -> None:
    namespace = NAMESPACE | {field: value}
    error = refusal(tools=[namespace])
    assert (error.status, error.param) == (422, f"tools[0].{field}")
