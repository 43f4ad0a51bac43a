"""Forced calls: what the grammar holds a reply to is what the parser reads as a call."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from serve_app.engine.request import Grammar
from serve_app.engine.sampling.grammar import GrammarCompiler
from serve_app.tools import FAMILIES, arguments_schema, forced
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_that_the_grammar_allows_is_read_as_its_calls(family: str, compiler: GrammarCompiler) -> None:
    held = forced(FAMILIES[family], TOOLS)
    grammar = Grammar.tool_calls(held.alternatives, held.separator)
    (weather_before, _, weather_after), (time_before, _, time_after) = held.alternatives
    weather = weather_before + '{"city": "Paris"}' + weather_after
    time = time_before + "{}" + time_after
    calls = [Call("get_weather", '{"city": "Paris"}'), Call("get_time", "{}")]
    for text, expected in ((weather, calls[:1]), (time, calls[1:])):
        assert accepts(compiler.start(grammar), text.encode())
        assert summary(read(family, text)) == expected
    for wrong in ("Hello", weather_before + "{}" + weather_after, time_before + '{"a": 1}' + time_after):
        assert not accepts(compiler.start(grammar), wrong.encode())
    if held.separator is None:
        assert not accepts(compiler.start(grammar), (weather + "\n" + time).encode())
    else:
        both = weather + held.separator + time
        assert accepts(compiler.start(grammar), both.encode())
        assert summary(read(family, both)) == calls


def test_families_whose_calls_stand_alone_can_be_held_to_several() -> None:
    several = {name for name, family in FAMILIES.items() if forced(family, TOOLS).separator is not None}
    assert several == {"hermes", "mistral_named", "plain"}
    assert forced(FAMILIES["hermes"], TOOLS, parallel=False).separator is None


def test_a_named_function_is_the_only_one() -> None:
    held = forced(FAMILIES["plain"], TOOLS, name="get_time")
    assert [before for before, _, _ in held.alternatives] == ['{"name": "get_time", "arguments": ']
    with pytest.raises(KeyError, match="nobody"):
        forced(FAMILIES["plain"], TOOLS, name="nobody")
    with pytest.raises(ValueError, match="no tools"):
        forced(FAMILIES["plain"], [])


def test_reasoning_that_the_prompt_has_begun_is_closed_before_the_call() -> None:
    held = forced(FAMILIES["hermes"], TOOLS, lead="</think>\n\n")
    assert all(before.startswith("</think>\n\n<tool_call>") for before, _, _ in held.alternatives)
    assert held.separator is None


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_an_empty_object(parameters: object) -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments_schema({"name": "f", "parameters": parameters}) == empty
    assert arguments_schema({"name": "f"}) == empty


def test_arguments_are_always_an_object() -> None:
    assert arguments_schema({"name": "f", "parameters": {"properties": {}}}) == {"type": "object", "properties": {}}
    assert arguments_schema({"name": "f", "parameters": {"type": ["object", "null"]}}) == {"type": "object"}
    with pytest.raises(ValueError, match="parameters of f must be of type object"):
        arguments_schema({"name": "f", "parameters": {"type": "array"}})


def test_schemas_are_passed_on_to_the_letter() -> None:
    (_, schema, _), _ = forced(FAMILIES["plain"], TOOLS).alternatives
    assert json.loads(schema) == SCHEMA
