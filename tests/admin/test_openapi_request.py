"""The document's schema of a chat request agrees with the code that reads it, at every bound."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator

from serve_app.admin.document import build_document
from serve_app.api.chat_request import ChatRequest, parse_chat_request
from serve_app.api.errors import ApiError
from serve_app.settings import GatewaySettings
from tests.api.test_values import VALUES
from tests.gateway.world import FULL_SETTINGS

MODELS = GatewaySettings.model_validate(FULL_SETTINGS).models
SERVED = {name: (model.context_length, model.max_output) for name, model in MODELS.items()}
DOCUMENT = build_document(MODELS)
SCHEMA = {"$ref": "#/components/schemas/ChatCompletionRequest", "components": DOCUMENT["components"]}
FIELD_SCHEMAS = DOCUMENT["components"]["schemas"]["ChatCompletionRequest"]["properties"]
OPERATION = schemathesis.openapi.from_dict(DOCUMENT)["/chat/completions"]["POST"]
VALIDATOR = Draft202012Validator(SCHEMA)
FIELDS = [field.alias or name for name, field in ChatRequest.model_fields.items()]
USER = {"role": "user", "content": "Hello"}
# What a field needs beside it.
BESIDE = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
# Rules that a schema can't express; the operation's description states them.
UNTOLD = (
    r"must be an integer, but it is the number -?[0-9]+(\.0\.|.*e\+)",  # 1.0 or 1e+20
    "prefix is only possible on the last message",
    "max_completion_tokens and max_tokens must be equal",
    "min_tokens must not be above max_tokens",
    "must not repeat",
    "stream_options.resume is (only possible with n: 1|not possible with logprobs)",
    "tool_choice must not be 'required' without tools",
    r"tool_choice\.(function|allowed_tools\.tools\[[0-9]+\]\.function)\.name must name one of the tools",
    "continue_final_message is only possible if",
    "add_generation_prompt (must be false|can be false only)",
    "chat_template_kwargs must be at most",
    "maximum context length",
    "both set the form of the reply",
    "cannot be combined with tools that may be called",
    "is a string but not valid JSON",
    r"^(guided_json|structured_outputs\.json) must be an object",  # a string that is JSON, and none
    "response_format.schema is only possible with json_object",
    "can't be enforced. (Send response_format|Leave it out)|is not a field here|is an older form|is not supported",
    "repetitions are written out|has a min[A-Z][a-z]+ of",
    "in a JSON schema|for a JSON schema|is a JSON schema of|characters: at most|asks for too much",
)


def is_untold(error: ApiError) -> bool:
    return any(re.search(rule, error.message) for rule in UNTOLD)


Numbers = list[tuple[str, float, bool]]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "messages": [USER], **fields}


def refusal(given: dict[str, Any]) -> ApiError | None:
    try:
        parse_chat_request(json.dumps(given).encode(), SERVED)
    except ApiError as error:
        return error
    return None


def ends() -> Numbers:
    """Field, value and whether it is inside, at both ends of every range of the document."""
    found: Numbers = []
    for field, schema in FIELD_SCHEMAS.items():
        step = _next_integer if "integer" in schema.get("type", ()) else math.nextafter
        for keyword, outward, inward in (("minimum", -math.inf, math.inf), ("maximum", math.inf, -math.inf)):
            if (end := schema.get(keyword)) is not None:
                found += [(field, end, True), (field, step(end, outward), False), (field, step(end, inward), True)]
            if (end := schema.get(f"exclusive{keyword.capitalize()}")) is not None:
                found += [(field, end, False), (field, step(end, inward), True)]
    return found


def _next_integer(at: float, towards: float) -> int:
    return int(at) + (1 if towards > at else -1)


@pytest.mark.parametrize(("field", "value", "inside"), ends())
def test_each_range_ends_where_the_document_says(field: str, value: float, inside: bool) -> None:
    given = body(**{field: value}, **BESIDE.get(field, {}))
    error = refusal(given)
    assert (error is None) is inside
    assert VALIDATOR.is_valid(given) is inside
    if error is not None:
        assert (error.status, error.param) == (422, field)


def test_every_number_of_a_request_has_its_range_in_the_document() -> None:
    bounded = {field for field, _, _ in ends()}
    for field, schema in FIELD_SCHEMAS.items():
        if {"integer", "number"} & set(schema.get("type", ())):
            assert field in bounded


def test_the_document_describes_each_field_that_the_code_reads_and_no_other() -> None:
    assert list(FIELD_SCHEMAS) == FIELDS
    assert all(schema["description"] for schema in FIELD_SCHEMAS.values())


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"model", "messages"}))
def test_null_is_the_same_as_absent(field: str) -> None:
    given = body(**{field: None})
    assert refusal(given) is None
    assert VALIDATOR.is_valid(given)


@pytest.mark.parametrize(("fields", "param", "words"), VALUES)
def test_a_value_that_is_rejected_is_invalid_by_the_document_unless_no_schema_can_express_it(
    fields: dict[str, Any], param: str, words: str
) -> None:
    given = {"model": "svc-chat", "messages": [USER], **fields}
    error = refusal(given)
    assert error is not None
    assert VALIDATOR.is_valid(given) is is_untold(error)


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[tuple[dict[str, Any], bool]] = [
    ({"role": "system", "content": "x"}, True),
    ({"role": "developer", "content": "x"}, True),
    ({"role": "user", "content": [{"type": "text", "text": "x"}]}, True),
    ({"role": "user", "content": []}, True),
    ({"role": "user", "content": None}, False),
    ({"role": "user"}, False),
    ({"role": "user", "content": [{"type": "text"}]}, False),
    ({"role": "user", "content": 5}, False),
    ({"role": "assistant", "content": "x", "tool_calls": None}, True),
    ({"role": "assistant", "content": None}, False),
    ({"role": "assistant", "tool_calls": []}, False),
    ({"role": "assistant", "tool_calls": [CALL]}, True),
    ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}, False),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, True),
    ({"role": "user", "content": "x", "tool_calls": [{**CALL, "type": "custom"}]}, False),
    ({"role": "system", "content": "x", "tool_calls": [{**CALL, "type": "custom"}]}, False),
    ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, False),
    ({"role": "assistant", "content": "x", "prefix": True}, True),
    ({"role": "tool", "content": "x", "tool_call_id": "1"}, True),
    ({"role": "tool", "content": "x"}, False),
    ({"role": "tool", "content": "x", "tool_call_id": None}, False),
    ({"role": "robot", "content": "x"}, False),
    ({"content": "x"}, False),
]


@pytest.mark.parametrize(("message", "right"), MESSAGES)
def test_a_message_is_valid_by_the_document_where_the_code_accepts_it(message: dict[str, Any], right: bool) -> None:
    given = body(messages=[message])
    assert (refusal(given) is None) is right
    assert VALIDATOR.is_valid(given) is right


FORMATS: list[tuple[dict[str, Any], bool]] = [
    ({"type": "text"}, True),
    ({"type": "json_object", "json_schema": None}, True),
    ({"type": "json_object", "json_schema": {"strict": 1}}, True),  # not read
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}, True),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": None}}, True),
    ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, False),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, False),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}, False),
    ({"type": "json_schema", "json_schema": None}, False),
    ({"type": "json_schema"}, False),
    ({"type": "json_object", "schema": {}}, True),
    ({"type": "json_object", "schema": 5}, False),
    ({"type": "grammar"}, False),
    ({}, False),
]


@pytest.mark.parametrize(("given", "right"), FORMATS)
def test_a_response_format_is_valid_by_the_document_where_the_code_accepts_it(
    given: dict[str, Any], right: bool
) -> None:
    whole = body(response_format=given)
    assert (refusal(whole) is None) is right
    assert VALIDATOR.is_valid(whole) is right


@pytest.mark.parametrize("kind", [None, True, 1, 1.5, "x", ["x"], {"x": 1}])
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_value_of_another_type_is_refused_exactly_where_the_document_refuses_it(field: str, kind: Any) -> None:
    given = body(**BESIDE.get(field, {})) | {field: kind}
    error = refusal(given)
    assert VALIDATOR.is_valid(given) is (error is None or is_untold(error))


@pytest.mark.parametrize("count", [10, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_request_that_the_document_allows_is_accepted_unless_it_breaks_a_rule_in_words(count: int) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(OPERATION.as_strategy())
    def check(case: schemathesis.Case) -> None:
        error = refusal(case.body)
        assert error is None or is_untold(error), error.message

    check()


def test_the_rules_that_no_schema_can_express_are_in_the_description() -> None:
    told = DOCUMENT["paths"]["/chat/completions"]["post"]["description"]
    fields = ("`prefix`", "`min_tokens`", "`resume`", "`tool_choice`")
    for words in ("decimal point", "equal", "repeat", "context", "Schema", *fields):
        assert words in told


def test_the_examples_are_requests_that_are_accepted() -> None:
    content = DOCUMENT["paths"]["/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        assert refusal(example["value"]) is None
        assert VALIDATOR.is_valid(example["value"])
