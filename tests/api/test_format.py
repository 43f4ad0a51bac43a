"""400: a body that is malformed or has a wrong type."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.chat_request import parse_chat_request
from serve_app.api.errors import ApiError
from tests.api.requests import SERVED, body, parse, refused
from tests.processor_time import at_most

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

NO_JSON = [
    (b"", "empty"),
    (b"  \n", "empty"),
    (b"hello", "line 1 column 1"),
    (b"{'model': 1}", "line 1 column 2"),
    (b'{"model": "svc-chat",}', "trailing comma"),
    (b'{"model": "svc-chat"} {}', "trailing characters"),
    (b'{"model": NaN}', "line 1 column"),
    (b'{"temperature": Infinity}', "line 1 column"),
    (b'{"temperature": -Infinity}', "line 1 column"),
    (b'{"model": "\xff\xfe"}', "unicode"),
    (b'{"model": "\xed\xa0\x80"}', "unicode"),
    (b'{"model": "\\ud800"}', "line 1 column"),
    (b'{"model": "\\udc00\\ud800"}', "line 1 column"),
    (b'{"model": "a\nb"}', "control character"),
    (b'{"model": "\x00"}', "control character"),
    (b"[" * 100_000, "recursion limit"),
    (b'{"a":' * 100_000, "recursion limit"),
    (b'{"n": ' + b"9" * 10_000 + b"}", "out of range"),
    (b"\x00\x00\x00\x00", "line 1 column 1"),
    (b"[]", "an array of 0"),
    (b"null", "null"),
    (b"true", "the boolean true"),
    (b"3", "the integer 3"),
    (b'"{}"', "the string"),
]


@pytest.mark.parametrize(("raw", "told"), NO_JSON, ids=[repr(raw[:24]) for raw, _ in NO_JSON])
def test_a_body_that_is_no_json_object_is_400_and_names_the_position(raw: bytes, told: str) -> None:
    error = refused(raw)
    assert (error.status, error.type, error.code) == (400, "invalid_request_error", "invalid_format")
    assert told in error.message


def test_a_body_over_the_size_limit_is_400() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(b'{"model": "' + b"a" * 100 + b'"}', SERVED, max_body_bytes=100)
    assert caught.value.status == 400
    assert "100 bytes" in caught.value.message


FIELDS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model": None}, "model", "missing", "required"),
    ({"model": 5}, "model", "the integer 5", "a string"),
    ({"messages": None}, "messages", "missing", "required"),
    ({"messages": "hi"}, "messages", 'the string "hi"', "an array"),
    ({"messages": {}}, "messages", "an object", "an array"),
    ({"messages": [USER, 3]}, "messages[1]", "the integer 3", "an object"),
    ({"messages": [None]}, "messages[0]", "missing", "required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing", "required"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "the integer 1", "a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing", "required"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "the integer 5", "text parts"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "an object", "text parts"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", 'the string "x"', "an object"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing", "req"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing", "re"),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name", "the integer 5", "a string"),
    ({"messages": [{**USER, "prefix": "yes"}]}, "messages[0].prefix", 'the string "yes"', "true or false"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing", "required"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "an object", "an array"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "an object",
        "a string",
    ),
    ({"stream": 1}, "stream", "the integer 1", "true or false"),
    ({"stream": "true"}, "stream", 'the string "true"', "true or false"),
    ({"stream_options": True}, "stream_options", "the boolean true", "an object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "the integer 1", "true or false"),
    ({"temperature": "1"}, "temperature", 'the string "1"', "a number"),
    ({"temperature": True}, "temperature", "the boolean true", "a number"),
    ({"top_p": []}, "top_p", "an array of 0", "a number"),
    ({"max_tokens": 1.0}, "max_tokens", "the number 1.0", "an integer"),
    ({"max_tokens": True}, "max_tokens", "the boolean true", "an integer"),
    ({"max_tokens": "5"}, "max_tokens", 'the string "5"', "an integer"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens", "the number 1.5", "an integer"),
    ({"n": 1.0}, "n", "the number 1.0", "an integer"),
    ({"stop": 5}, "stop", "the integer 5", "a string or an array of strings"),
    ({"stop": ["a", 5]}, "stop[1]", "the integer 5", "a string"),
    ({"stop": {}}, "stop", "an object", "a string or an array of strings"),
    ({"seed": 1.0}, "seed", "the number 1.0", "an integer"),
    ({"frequency_penalty": "0"}, "frequency_penalty", 'the string "0"', "a number"),
    ({"presence_penalty": False}, "presence_penalty", "the boolean false", "a number"),
    ({"logit_bias": []}, "logit_bias", "an array of 0", "an object"),
    ({"logit_bias": {"5": True}}, "logit_bias.5", "the boolean true", "a number"),
    ({"logprobs": 1}, "logprobs", "the integer 1", "true or false"),
    ({"top_logprobs": "1"}, "top_logprobs", 'the string "1"', "an integer"),
    ({"response_format": "json"}, "response_format", 'the string "json"', "an object"),
    ({"response_format": {}}, "response_format.type", "missing", "required"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
        "an array of 0",
        "an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        'the string "yes"',
        "true or false",
    ),
    ({"tools": {}}, "tools", "an object", "an array"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing", "required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing", "required"),
    ({"tool_choice": 3}, "tool_choice", "the integer 3", "a string or an object"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing", "required"),
    ({"top_k": 1.5}, "top_k", "the number 1.5", "an integer"),
    ({"min_p": "0"}, "min_p", 'the string "0"', "a number"),
    ({"repetition_penalty": None, "min_tokens": "1"}, "min_tokens", 'the string "1"', "an integer"),
    ({"ignore_eos": 0}, "ignore_eos", "the integer 0", "true or false"),
]


@pytest.mark.parametrize(("more", "field", "found", "expected"), FIELDS, ids=[row[1] + " " + row[2] for row in FIELDS])
def test_a_wrong_type_is_400_and_names_field_found_and_expected(
    more: dict[str, Any], field: str, found: str, expected: str
) -> None:
    error = refused(**more)
    assert (error.status, error.code, error.param) == (400, "invalid_format", field)
    assert error.message.startswith(field + " ")
    assert found in error.message
    assert expected in error.message


def test_a_wrong_type_anywhere_is_reported_before_a_wrong_value() -> None:
    assert refused(model="nope", temperature=9, min_tokens="x").param == "min_tokens"
    assert refused(messages=[{"role": "nobody", "content": "x"}, {"role": "user"}]).param == "messages[1].content"


def test_null_is_the_same_as_absent_everywhere() -> None:
    optional = [
        "stream stream_options temperature top_p max_tokens max_completion_tokens n stop seed frequency_penalty",
        "presence_penalty logit_bias logprobs top_logprobs response_format tools tool_choice top_k min_p",
        "repetition_penalty min_tokens ignore_eos",
    ]
    assert parse(**dict.fromkeys(" ".join(optional).split())) == parse()
    message = {"role": "user", "content": "Hello", "name": None, "tool_calls": None, "prefix": None}
    assert parse(messages=[message]) == parse()


def test_unknown_fields_are_ignored_with_any_value() -> None:
    common = {"user": 5, "metadata": [], "store": True, "service_tier": None, "parallel_tool_calls": {}}
    assert parse(**common, prompt_cache_key=1.5, x=[[[]]]) == parse()


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {str(n): "a" for n in range(150_000)}},
        {"stop": [1] * 500_000},
        {"messages": [3] * 500_000},
        {"messages": [{"role": "user", "content": [1] * 500_000}]},
        {"tools": [1] * 500_000},
    ],
    ids=["logit_bias", "stop", "messages", "parts", "tools"],
)
def test_a_million_faults_cost_no_more_than_one(more: dict[str, Any]) -> None:
    with at_most(1.5):
        refused(**more)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELD_NAMES = sorted(body()) + sorted({row[1].split(".")[0].split("[")[0] for row in FIELDS})


def only_api_errors(raw: bytes) -> None:
    refusal: ApiError | None = None
    try:
        parse_chat_request(raw, SERVED)
    except ApiError as error:
        refusal = error
    assert refusal is None or (refusal.status in (400, 422) and len(refusal.message) < 2000)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_an_api_error(raw: bytes) -> None:
    only_api_errors(raw)


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_no_json_raises_anything_but_an_api_error(count: int) -> None:
    @settings(max_examples=count)
    @given(st.dictionaries(st.sampled_from(FIELD_NAMES), json_values), st.booleans())
    def check(fields: dict[str, Any], valid_start: bool) -> None:
        value = body(**fields) if valid_start else fields
        only_api_errors(json.dumps(value).encode("utf-8", "surrogatepass"))

    check()


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_no_messages_raise_anything_but_an_api_error(count: int) -> None:
    message = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "prefix"]), json_values)

    @settings(max_examples=count)
    @given(st.lists(message, max_size=3))
    def check(messages: list[dict[str, Any]]) -> None:
        only_api_errors(json.dumps(body(messages=messages)).encode("utf-8", "surrogatepass"))

    check()
