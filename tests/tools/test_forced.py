"""Forced calls: what the grammar holds a reply to is what the parser reads as a call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from serve_app.engine.request import Grammar
from serve_app.engine.sampling.grammar import GrammarCompiler
from serve_app.tools import FAMILIES, Forced, arguments_schema, forced, optional
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, accepts
from tests.tools.reading import Call, read, summary

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def held_to(calls: Forced) -> Grammar:
    return Grammar.tool_calls(**dataclasses.asdict(calls))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_that_the_grammar_allows_is_read_as_its_calls(family: str, compiler: GrammarCompiler) -> None:
    held = forced(FAMILIES[family], TOOLS)
    (weather_before, _, weather_after), (time_before, _, time_after) = held.alternatives
    weather = weather_before + '{"city": "Paris"}' + weather_after
    time = time_before + "{}" + time_after
    calls = [Call("get_weather", '{"city": "Paris"}'), Call("get_time", "{}")]
    for name, call, expected in (("get_weather", weather, calls[0]), ("get_time", time, calls[1])):
        text = held.opening + call + held.closing
        for grammar in (held_to(held), held_to(forced(FAMILIES[family], TOOLS, name=name, parallel=False))):
            assert accepts(compiler.start(grammar), text.encode())
        assert summary(read(family, text)) == [expected]
    for wrong in ("Hello", weather_before + "{}" + weather_after, time_before + '{"a": 1}' + time_after):
        assert not accepts(compiler.start(held_to(held)), (held.opening + wrong + held.closing).encode())
    several = held.opening + weather + ("\n" if held.separator is None else held.separator) + time + held.closing
    assert accepts(compiler.start(held_to(held)), several.encode()) == (held.separator is not None)
    if held.separator is not None:
        assert summary(read(family, several)) == calls
    assert not accepts(compiler.start(held_to(forced(FAMILIES[family], TOOLS, parallel=False))), several.encode())


def test_only_families_that_write_single_calls_are_held_to_one() -> None:
    assert {name for name, family in FAMILIES.items() if forced(family, TOOLS).separator is None} == {"llama3"}
    assert forced(FAMILIES["hermes"], TOOLS, parallel=False).separator is None


def test_a_named_function_is_the_only_one() -> None:
    held = forced(FAMILIES["plain"], TOOLS, name="get_time")
    assert [before for before, _, _ in held.alternatives] == ['{"name": "get_time", "arguments": ']
    with pytest.raises(KeyError, match="nobody"):
        forced(FAMILIES["plain"], TOOLS, name="nobody")
    with pytest.raises(ValueError, match="no tools"):
        forced(FAMILIES["plain"], [])


def test_functions_that_need_not_be_called_are_held_to_their_schemas_where_they_are_strict() -> None:
    held = optional(FAMILIES["hermes"], TOOLS)
    assert [json.loads(schema) for _, schema, _ in held.alternatives] == [SCHEMA, {"type": "object"}]
    assert held.optional == "<tool_call>"
    with pytest.raises(ValueError, match="no tools"):
        optional(FAMILIES["plain"], [])


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_an_empty_object(parameters: object) -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments_schema({"name": "f", "parameters": parameters}) == empty
    assert arguments_schema({"name": "f"}) == empty


def test_arguments_are_always_an_object() -> None:
    assert arguments_schema({"name": "f", "parameters": {"properties": {}}})["type"] == "object"
    assert arguments_schema({"name": "f", "parameters": {"type": ["object", "null"]}}) == {"type": "object"}
    with pytest.raises(ValueError, match="parameters of f must be of type object"):
        arguments_schema({"name": "f", "parameters": {"type": "array"}})


def test_a_function_that_lists_its_parameters_is_given_no_others() -> None:
    listed = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    closed = {"type": "object", **listed, "additionalProperties": False}
    assert arguments_schema({"name": "f", "parameters": listed}) == closed
    for more in (
        {"additionalProperties": {"type": "integer"}},
        {"additionalProperties": True},
        {"patternProperties": {"^x": True}},
        {"allOf": [{"properties": {"days": {"type": "integer"}}}]},
        {"$ref": "#/$defs/a"},
        {"minProperties": 2},
        {"required": ["city", "days"]},
    ):
        assert arguments_schema({"name": "f", "parameters": {**listed, **more}}) == {
            "type": "object",
            **listed,
            **more,
        }


def test_schemas_are_passed_on_to_the_letter() -> None:
    (_, schema, _), _ = forced(FAMILIES["plain"], TOOLS).alternatives
    assert json.loads(schema) == SCHEMA
