"""400: a body that is malformed or has a wrong type; `test_malformed` has each of them in a table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.api import chat_request
from serve_app.api.chat_request import ChatRequest, parse_chat_request
from serve_app.api.errors import ApiError
from tests.api.requests import SERVED, body, parse, refused
from tests.malformed.types import FULL


def test_a_body_over_the_size_limit_is_400() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(b'{"model": "' + b"a" * 100 + b'"}', SERVED, max_body_bytes=100)
    assert caught.value.status == 400
    assert "100 bytes" in caught.value.message


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
        {"logit_bias": {str(n): "a" for n in range(1000)}},
        {"stop": [1] * 1000},
        {"messages": [3] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"tools": [1] * 1000},
    ],
    ids=["logit_bias", "stop", "messages", "parts", "tools"],
)
def test_only_the_first_of_many_faults_is_looked_for(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body(**more))
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "more",
    [{"messages": [3] * 20_000}, {"tools": [1] * 129}, {"logit_bias": {str(n): "a" for n in range(1025)}}],
    ids=["messages", "tools", "logit_bias"],
)
def test_more_than_is_possible_is_refused_before_each_is_read(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_request, "typed", pytest.fail)
    assert refused(**more).status == 422


LONG = [pytest.mark.slow, pytest.mark.long]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELD_NAMES = sorted(FULL)


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


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=LONG)])
def test_no_json_raises_anything_but_an_api_error(count: int) -> None:
    @settings(max_examples=count)
    @given(st.dictionaries(st.sampled_from(FIELD_NAMES), json_values), st.booleans())
    def check(fields: dict[str, Any], valid_start: bool) -> None:
        value = body(**fields) if valid_start else fields
        only_api_errors(json.dumps(value).encode("utf-8", "surrogatepass"))

    check()


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=LONG)])
def test_no_messages_raise_anything_but_an_api_error(count: int) -> None:
    message = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "prefix"]), json_values)

    @settings(max_examples=count)
    @given(st.lists(message, max_size=3))
    def check(messages: list[dict[str, Any]]) -> None:
        only_api_errors(json.dumps(body(messages=messages)).encode("utf-8", "surrogatepass"))

    check()
