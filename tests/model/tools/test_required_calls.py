"""Required calls: a reply that the grammar allows is read as a call by the parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.contracts.generation import Grammar
from serve_app.engine.grammar.compiler import GrammarCompiler
from serve_app.model.dialect import Dialect
from serve_app.model.tools.call_grammars import BadTool, arguments_schema, optional_calls, required_calls
from serve_app.model.tools.format_table import TOOL_FORMATS
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, accepts
from tests.model.test_replica import a_call
from tests.model.tools.reading import Call, read, summary

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def options(grammar: Grammar) -> dict[str, Any]:
    """Returns the options that `Grammar.tool_calls` was given."""
    made: dict[str, Any] = json.loads(grammar.text)
    return made


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_reply_that_the_grammar_allows_is_read_as_its_calls(name: str, compiler: GrammarCompiler) -> None:
    held = required_calls(TOOL_FORMATS[name], TOOLS)
    opening, closing, separator = (options(held)[key] for key in ("opening", "closing", "separator"))
    (weather_before, _, weather_after), (time_before, _, time_after) = options(held)["alternatives"]
    weather = weather_before + '{"city": "Paris"}' + weather_after
    time = time_before + "{}" + time_after
    calls = [Call("get_weather", '{"city": "Paris"}'), Call("get_time", "{}")]
    for tool, call, expected in zip(TOOLS, (weather, time), calls, strict=True):
        text = opening + call + closing
        for grammar in (held, required_calls(TOOL_FORMATS[name], [tool], parallel=False)):
            assert accepts(compiler.start_grammar(grammar), text.encode())
        assert summary(read(name, text)) == [expected]
    for wrong in ("Hello", weather_before + "{}" + weather_after, time_before + '{"a": 1}' + time_after):
        assert not accepts(compiler.start_grammar(held), (opening + wrong + closing).encode())
    several = opening + weather + ("\n" if separator is None else separator) + time + closing
    assert accepts(compiler.start_grammar(held), several.encode()) == (separator is not None)
    if separator is not None:
        assert summary(read(name, several)) == calls
    assert not accepts(
        compiler.start_grammar(required_calls(TOOL_FORMATS[name], TOOLS, parallel=False)), several.encode()
    )


def test_only_formats_of_single_calls_are_held_to_one() -> None:
    single = {name for name, form in TOOL_FORMATS.items() if options(required_calls(form, TOOLS))["separator"] is None}
    assert single == {"llama3"}
    assert options(required_calls(TOOL_FORMATS["hermes"], TOOLS, parallel=False))["separator"] is None


class Chat:
    """A chat template without any tools."""

    template = None

    def literal(self, value: Any, spared: Any = ()) -> Any:
        return value

    def text(self, messages: Any, continue_final: bool = False, tools: Any = None, variables: Any = ()) -> str:
        return ""

    def tokenize(self, text: str) -> list[int]:
        return [0]


def test_a_named_function_is_the_only_one() -> None:
    call = a_call(tools=tuple(TOOLS), tool_choice="required", function="get_time")
    grammar = Dialect(Chat()).prompt(call).sampling.grammar  # type: ignore[arg-type]
    assert grammar is not None
    assert [before for before, _, _ in options(grammar)["alternatives"]] == ['{"name": "get_time", "arguments": ']
    assert options(grammar)["separator"] is None


def test_functions_that_need_not_be_called_are_held_to_their_schemas_where_they_are_strict() -> None:
    held = options(optional_calls(TOOL_FORMATS["hermes"], TOOLS))
    assert [json.loads(schema) for _, schema, _ in held["alternatives"]] == [SCHEMA, {"type": "object"}]
    assert held["optional"] == "<tool_call>"


@pytest.mark.parametrize(("strict", "lenient"), [(False, [1]), (True, []), (None, [1])])
def test_keywords_may_be_ignored_where_a_function_is_not_strict(strict: bool | None, lenient: list[int]) -> None:
    tools = [{"type": "function", "function": {"name": f"f{at}", "strict": at == 0 or strict}} for at in range(2)]
    assert json.loads(required_calls(TOOL_FORMATS["plain"], tools).text)["lenient"] == lenient


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_an_empty_object(parameters: object) -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments_schema({"name": "f", "parameters": parameters}) == empty
    assert arguments_schema({"name": "f"}) == empty


def test_arguments_are_always_an_object() -> None:
    assert arguments_schema({"name": "f", "parameters": {"properties": {}}})["type"] == "object"
    assert arguments_schema({"name": "f", "parameters": {"type": ["object", "null"]}}) == {"type": "object"}
    with pytest.raises(BadTool, match="parameters of f must be of type object") as raised:
        arguments_schema({"name": "f", "parameters": {"type": "array"}})
    assert raised.value.name == "f"


def test_a_function_that_lists_its_parameters_is_given_no_others(compiler: GrammarCompiler) -> None:
    listed = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    for more, others in (
        ({}, []),
        ({"required": ["city", "days"]}, ['"days": 3']),
        ({"allOf": [{"properties": {"days": {"type": "integer"}}}]}, ['"days": 3']),
        ({"additionalProperties": {"type": "integer"}}, ['"days": 3', '"x": 3']),
        ({"additionalProperties": True}, ['"days": 3', '"x": 3']),
        ({"patternProperties": {"^x": True}}, ['"x": 3']),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": {**listed, **more}}}
        held = required_calls(TOOL_FORMATS["plain"], [tool], parallel=False)
        (before, _, after) = options(held)["alternatives"][0]
        for other in ('"days": 3', '"x": 3'):
            text = f'{before}{{"city": "Rome", {other}}}{after}'
            assert accepts(compiler.start_grammar(held), text.encode()) == (other in others), (more, other)


def test_schemas_are_passed_on_unchanged() -> None:
    (_, schema, _), _ = options(required_calls(TOOL_FORMATS["plain"], TOOLS))["alternatives"]
    assert json.loads(schema) == SCHEMA
