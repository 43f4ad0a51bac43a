"""Other names for the form of a reply: enforced where they mean what we have, refused with what to send elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.requests import parse, refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_json": SCHEMA}, STRICT),
        ({"guided_json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, STRICT),
        ({"structured_outputs": {"json": SCHEMA}}, STRICT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, STRICT),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"structured_outputs": {"json_object": False, "grammar": None}}, None),
        ({"structured_outputs": {}}, None),
        ({"guided_regex": "[0-9]+"}, {"type": "regex", "pattern": "[0-9]+"}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {"type": "regex", "pattern": "[0-9]+"}),
        ({"guided_choice": ["yes", "n.o"]}, {"type": "regex", "pattern": r"yes|n\.o"}),
        ({"structured_outputs": {"choice": ["yes"]}}, {"type": "regex", "pattern": "yes"}),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, STRICT),
        ({"guided_json": SCHEMA, "tools": [TOOL]}, STRICT),
        ({"guided_regex": "a", "tools": [TOOL], "tool_choice": "none"}, {"type": "regex", "pattern": "a"}),
        ({"guided_json": None, "guided_regex": None, "guided_choice": None, "structured_outputs": None}, None),
    ],
    ids=str,
)
def test_what_means_the_same_is_the_same_form(fields: dict[str, Any], form: Any) -> None:
    assert parse(**fields).response_format == form


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "json, regex, choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "enforced"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "send only one"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json", "response_format"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice", "guided_json"),
        ({"guided_regex": "a", "tools": [TOOL]}, "guided_regex", "tools"),
        ({"guided_regex": "a{100000}"}, "guided_regex", "repetitions"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "empty"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"a":' + "[" * 250 + "]" * 250 + "}"}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"const": NaN}'}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"a":[' + "[]," * 10**6 + "[]]}"}, "guided_json", "the maximum is 262144"),
        ({"structured_outputs": {"json": " " * 300_000 + "{}"}}, "structured_outputs.json", "the maximum is 262144"),
        ({"guided_json": {"const": "x" * 10_001}}, "guided_json", "10001"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "json_object"),
        ({"response_format": {"type": "json_object", "schema": {"const": "x" * 10_001}}}, "response_format.schema", ""),
    ],
)
def test_what_is_wrong_is_422_and_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (422, param)
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
    ],
    ids=str,
)
def test_a_wrong_type_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)
