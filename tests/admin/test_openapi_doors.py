"""The document's schemas of the doors besides chat agree with the code that reads their bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator

from serve_app.api.codec import MAX_ITEMS
from serve_app.api.errors import ApiError
from serve_app.api.messages_door import CountTokensDoor, MessagesDoor
from serve_app.api.responses_door import ResponsesDoor
from serve_app.api.tokenize_door import DetokenizeDoor, TokenizeDoor
from tests.admin.test_openapi_request import DOCUMENT, SERVED, UNTOLD

LOADED = schemathesis.openapi.from_dict(DOCUMENT)
USER = {"role": "user", "content": "Hello"}


class Body(NamedTuple):
    """A body, and rules of its format that no schema can express."""

    parse: Callable[[bytes, Any, int, int], Any]
    least: dict[str, Any]  # a small body
    untold: tuple[str, ...] = ()


MESSAGES = (
    "must not repeat|messages must have at least one message",
    "must not be 'any' without tools",
    "tool_choice.name must name one of the tools",
    "has tool_use, so a message with the tool_result must follow",
    "output_format is not a field here|mcp_servers is not supported",
)
RESPONSES = (
    "input must have at least one (item|message)",
    "is not stored",
    "(tool_choice|tools)[a-z_.0-9\\[\\]]* (can't be 'required'|must name|must not repeat)",
    "stream_options.resume is (only|not) possible|background (needs store: true|is not possible together with)",
    "max_output_tokens must be at least|(conversation|prompt|context_management|moderation) is not supported",
    "must have names of at most 64|metadata.* must have at most 512",
)
BODIES: dict[str, Body] = {
    "/messages": Body(MessagesDoor().parse, {"messages": [USER], "max_tokens": 5}, MESSAGES),
    "/messages/count_tokens": Body(CountTokensDoor().parse, {"messages": [USER]}, MESSAGES),
    "/tokenize": Body(TokenizeDoor().parse, {"prompt": "a"}, ("add_generation_prompt can't be false",)),
    "/detokenize": Body(DetokenizeDoor().parse, {"tokens": [1]}),
    "/responses": Body(ResponsesDoor().parse, {"input": "Hi"}, RESPONSES),
}


def refusal(path: str, given: Any) -> ApiError | None:
    try:
        BODIES[path].parse(json.dumps(given).encode(), SERVED, 2**22, MAX_ITEMS)
    except ApiError as error:
        return error
    return None


def is_untold(path: str, error: ApiError) -> bool:
    return any(re.search(rule, error.message) for rule in (*UNTOLD, *BODIES[path].untold))


def validator(path: str) -> Draft202012Validator:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def fields(path: str) -> dict[str, Any]:
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties: dict[str, Any] = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return properties


@pytest.mark.parametrize("count", [4, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_the_document_allows_is_accepted_unless_it_breaks_a_rule_in_words(path: str, count: int) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None)
    @given(LOADED[path]["POST"].as_strategy())
    def check(case: schemathesis.Case) -> None:
        error = refusal(path, case.body)
        assert error is None or is_untold(path, error), error.message

    check()


BLOCKS: list[tuple[str, Any, bool]] = [
    ("user", "x", True),
    ("user", [], True),
    ("user", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], True),
    ("user", [{"type": "text"}], False),
    ("user", [{"type": "image", "source": {"type": "url", "url": "x"}}], False),
    ("user", [{"type": "document", "source": {"type": "text"}}], False),
    ("user", [{"type": "tool_result", "tool_use_id": "1"}], True),
    ("user", [{"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": True}], True),
    ("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}], True),
    ("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "text": "x"}]}], False),
    ("user", [{"type": "tool_result", "content": "x"}], False),
    ("user", [{"type": "text", "text": "x", "content": [{"type": "text", "text": "y"}]}], True),
    ("user", [{"type": "text", "text": "x", "content": [{"type": "image", "text": ""}]}], False),
    ("user", [{"type": "tool_use", "id": "1", "name": "f", "input": {}}], False),
    ("user", [{"type": "thinking", "thinking": "x", "signature": ""}], False),
    ("user", None, False),
    ("assistant", [{"type": "thinking", "thinking": "x", "signature": "s"}], True),
    ("assistant", [{"type": "redacted_thinking", "data": "x"}], True),
    ("assistant", [{"type": "thinking", "thinking": "x", "content": [{"type": "image", "text": ""}]}], False),
    ("assistant", [{"type": "tool_use", "id": "1", "name": "f"}], False),
    ("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": "{}"}], False),
    ("assistant", [{"type": "tool_result", "tool_use_id": "1"}], False),
    ("system", "x", True),
    ("system", [{"type": "text", "text": "x"}], True),
    ("system", [{"type": "thinking", "thinking": "x"}], False),
    ("system", [{"type": "text", "text": "x", "content": [{"type": "image", "text": ""}]}], False),
    ("robot", "x", False),
]


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens"])
@pytest.mark.parametrize(("role", "content", "right"), BLOCKS)
def test_a_message_is_valid_by_the_document_where_the_code_accepts_it(
    path: str, role: str, content: Any, right: bool
) -> None:
    given = {"model": "svc-chat", "max_tokens": 5, "messages": [USER, {"role": role, "content": content}, USER]}
    error = refusal(path, given)
    assert (error is None) is right, error
    assert validator(path).is_valid(given) is right


@pytest.mark.parametrize("kind", [None, True, 1, 1.5, "x", ["x"], {"x": 1}])
@pytest.mark.parametrize(("path", "field"), [(path, field) for path in BODIES for field in fields(path)])
def test_a_value_of_another_type_is_refused_exactly_where_the_document_refuses_it(
    path: str, field: str, kind: Any
) -> None:
    given = {"model": "svc-chat", **BODIES[path].least, field: kind}
    error = refusal(path, given)
    assert validator(path).is_valid(given) is (error is None or is_untold(path, error)), error and error.message


@pytest.mark.parametrize("path", BODIES)
def test_each_field_of_a_body_is_described(path: str) -> None:
    for name, field in fields(path).items():
        assert field.get("description") or any("description" in kind for kind in field.get("anyOf", ())), name
