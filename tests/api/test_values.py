"""422: right types with a wrong value; and what a valid request is parsed into."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.api.chat_request import parse_chat_request
from serve_app.api.errors import ApiError
from tests.api.requests import SERVED, body, parse, refused

USER = {"role": "user", "content": "Hello"}
PREFIX = {"role": "assistant", "content": "So"}


def function(name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", '"robot"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "only text",
    ),
    ({"messages": [{**USER, "prefix": True}]}, "messages[0].prefix", "assistant"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}, USER]}, "messages[0].prefix", "last"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream_options": {}, "stream": False}, "stream_options", "stream"),
    ({"temperature": -0.1}, "temperature", "from 0 to 2"),
    ({"temperature": 2.1}, "temperature", "2.1"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": -(10**30)}, "max_tokens", "more than 20 digits"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "5 and 6"),
    ({"n": 0}, "n", "from 1 to 8"),
    ({"n": 9}, "n", "9"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "from 0"),
    ({"continue_final_message": True}, "continue_final_message", "assistant's"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
    (
        {"messages": [PREFIX], "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "must be false",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "none, minimal, low"),
    ({"chat_template_kwargs": {f"v{n}": n for n in range(17)}}, "chat_template_kwargs", "at most 16"),
    ({"chat_template_kwargs": {"a": "x" * 9000}}, "chat_template_kwargs", "8192 bytes"),
    ({"seed": 2**63}, "seed", "9223372036854775807"),
    ({"seed": -(2**63) - 1}, "seed", "seed"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "from -2 to 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", "from -2 to 2"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", "logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "A-Z",
    ),
    ({"tools": [function(f"f{n}") for n in range(129)]}, "tools", "at most 128"),
    ({"tools": [function("a b")]}, "tools[0].function.name", '"a b"'),
    ({"tools": [function("a" * 65)]}, "tools[0].function.name", "64"),
    ({"tools": [function(), function()]}, "tools[1].function.name", "twice"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type", "function"),
    ({"tool_choice": "maybe"}, "tool_choice", '"maybe"'),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": named("g"), "tools": [function()]}, "tool_choice.function.name", '"g"'),
    ({"tool_choice": allowed("g"), "tools": [function()]}, "tool_choice.allowed_tools.tools[0].function.name", '"g"'),
    ({"tool_choice": allowed(), "tools": [function()]}, "tool_choice.allowed_tools.tools", "1 to 128"),
    (
        {"tool_choice": allowed("f", mode="none"), "tools": [function()]},
        "tool_choice.allowed_tools.mode",
        "auto or required",
    ),
    ({"tool_choice": {"type": "custom"}, "tools": [function()]}, "tool_choice.type", "function or allowed_tools"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 1.5}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 10"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "1e-38"),
    ({"min_tokens": -1}, "min_tokens", "from 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens"),
]


@pytest.mark.parametrize(("more", "field", "told"), VALUES, ids=[f"{row[1]} {row[2]}" for row in VALUES])
def test_a_wrong_value_is_422_and_names_the_field(more: dict[str, Any], field: str, told: str) -> None:
    error = refused(**more)
    assert (error.status, error.type, error.code, error.param) == (
        422,
        "invalid_request_error",
        "invalid_parameter",
        field,
    )
    assert told in error.message


def test_an_infinite_number_is_out_of_range() -> None:
    raw = json.dumps(body()).encode()[:-1] + b', "temperature": 1e999}'
    assert (refused(raw).status, refused(raw).param) == (422, "temperature")


def test_an_unknown_model_names_the_served_ones() -> None:
    error = refused(model="gpt-9")
    assert (error.status, error.code, error.param) == (422, "model_not_found", "model")
    assert "svc-chat, svc-coder" in error.message


def test_defaults_are_those_of_the_contract() -> None:
    request = parse()
    assert request.model == "svc-chat"
    assert request.messages == (USER,)
    assert (request.temperature, request.top_p, request.n) == (1.0, 1, 1)
    assert (request.max_tokens, request.seed, request.stop) == (None, None, ())
    assert (request.stream, request.include_usage, request.logprobs, request.tool_choice) == (
        False,
        False,
        False,
        "none",
    )
    assert request.estimated_prompt_tokens > 1
    with pytest.raises(ValidationError, match="frozen"):
        request.model = "other"  # type: ignore[misc]


EDGES: list[tuple[dict[str, Any], str, Any]] = [
    ({"temperature": 0}, "temperature", 0),
    ({"temperature": 2}, "temperature", 2),
    ({"top_p": 1}, "top_p", 1),
    ({"max_tokens": 4096}, "max_tokens", 4096),
    ({"max_completion_tokens": 7}, "max_tokens", 7),
    ({"max_completion_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
    ({"max_tokens": 32000}, "max_tokens", 32000),  # counts as the model's limit
    ({"max_completion_tokens": 10**30}, "max_tokens", 10**30),
    ({"n": 8}, "n", 8),
    ({"stop_token_ids": [5, 0]}, "stop_token_ids", (5, 0)),
    ({"messages": [PREFIX], "continue_final_message": True}, "continue_final", True),
    (
        {"messages": [PREFIX], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final",
        True,
    ),
    ({"messages": [PREFIX | {"prefix": True}], "add_generation_prompt": False}, "continue_final", True),
    ({"messages": [PREFIX], "continue_final_message": False, "add_generation_prompt": True}, "continue_final", False),
    ({"reasoning_effort": "none"}, "reasoning_effort", "none"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "has_usage_in_each_chunk", True),
    ({"stop": "END"}, "stop", ("END",)),
    ({"stop": []}, "stop", ()),
    ({"stop": ["a"] * 16}, "stop", ("a",) * 16),
    ({"seed": -(2**63)}, "seed", -(2**63)),
    ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
    ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
    ({"stream": True, "stream_options": {"include_usage": None}}, "include_usage", False),
    ({"logit_bias": {"5": -100, "0": 1.5}}, "logit_bias", {5: -100.0, 0: 1.5}),
    ({"logit_bias": {}}, "logit_bias", {}),
    ({"logprobs": True, "top_logprobs": 20}, "top_logprobs", 20),
    ({"response_format": {"type": "text"}}, "response_format", None),
    ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
    ({"tools": [function()]}, "tool_choice", "auto"),
    ({"tools": []}, "tool_choice", "none"),
    ({"tool_choice": "auto"}, "tools", ()),
    ({"tools": [function()], "tool_choice": named("f")}, "forced_function", "f"),
    ({"tools": [function()], "tool_choice": named("f")}, "tool_choice", "required"),
    ({"tools": [function(), function("g")], "tool_choice": allowed("g", "g")}, "allowed_functions", ("g",)),
    ({"tools": [function()], "tool_choice": allowed("f")}, "tool_choice", "auto"),
    ({"tools": [function()], "tool_choice": allowed("f", mode="required")}, "tool_choice", "required"),
    ({"tools": [function()], "tool_choice": allowed("f", mode="required")}, "forced_function", None),
    ({"top_k": -1}, "top_k", 0),
    ({"min_tokens": 8, "max_tokens": 8}, "min_tokens", 8),
    ({"ignore_eos": True}, "ignore_eos", True),
]


@pytest.mark.parametrize(("more", "field", "value"), EDGES, ids=[f"{row[1]} {row[2]}"[:50] for row in EDGES])
def test_every_allowed_value_is_kept(more: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(parse(**more), field) == value


def test_messages_are_ready_for_a_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = parse(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1", "extra": 5},
            {"role": "assistant", "content": "So", "prefix": True, "tool_calls": []},
        ]
    )
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So"},
    )
    assert request.continue_final
    assert not parse().continue_final


def test_several_calls_at_once_are_allowed_unless_refused() -> None:
    assert parse().parallel_tool_calls
    assert parse(parallel_tool_calls=None).parallel_tool_calls
    assert not parse(parallel_tool_calls=False).parallel_tool_calls


def test_output_is_limited_by_the_model_asked_for() -> None:
    served = {"svc-chat": (1024, 128)}
    with pytest.raises(ApiError) as caught:
        parse_chat_request(json.dumps(body(min_tokens=129)).encode(), served)
    assert "from 0 to 128" in caught.value.message
    assert SERVED["svc-chat"] == (32768, 4096)
