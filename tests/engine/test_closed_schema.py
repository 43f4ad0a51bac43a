"""Objects have no properties that their schema does not mention, unless it says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.grammar.closed_schema import closed
from serve_app.engine.grammar.compiler import GrammarCompiler
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, accepts


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def listed(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [ref("node"), {"type": "null"}]}}}
# A schema, objects that it allows, and objects that only JSON Schema's own default would allow.
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "top": (listed("a"), [{"a": 1}, {}], [{"a": 1, "x": 1}, {"x": 1}]),
    "no properties": ({"type": "object"}, [{"x": 1}, {}], []),
    "no property": (listed(), [{}], [{"x": 1}]),
    "nested": ({"properties": {"o": listed("a")}, "type": "object"}, [{"o": {"a": 1}}], [{"o": {"x": 1}}]),
    "items": ({"type": "array", "items": listed("a")}, [[{"a": 1}]], [[{"x": 1}]]),
    "values": ({"type": "object", "additionalProperties": listed("a")}, [{"x": {"a": 1}}], [{"x": {"x": 1}}]),
    "allowed": (listed("a", additionalProperties=True), [{"a": 1, "x": "y"}], []),
    "of a type": (listed("a", additionalProperties={"type": "null"}), [{"a": 1, "x": None}], []),
    "by pattern": (listed("a", patternProperties={"^x": {"type": "null"}}), [{"a": 1, "xy": None}], [{"y": 1}]),
    "by pattern alone": ({"type": "object", "patternProperties": {"^x": {}}}, [{"xy": 1}, {}], [{"y": 1}]),
    "inherited by pattern": ({"allOf": [listed("a"), {"patternProperties": {"^x": {}}}]}, [{"a": 1, "xy": 1}], []),
    "required alone": (listed("a", required=["b"]), [{"a": 1, "b": "c"}, {"b": 1}], [{"b": 1, "x": 1}]),
    "union": ({"anyOf": [listed("a"), listed("b"), {"type": "null"}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "reference": ({**ref("o"), "$defs": {"o": listed("a")}}, [{"a": 1}], [{"x": 1}]),
    "reference to a node": ({**ref("node"), "$defs": {"node": NODE}}, [{"v": 1, "next": {"next": None}}],
                            [{"v": 1, "next": {"x": None}}]),
    "one of allOf": ({"allOf": [ref("o")], "$defs": {"o": listed("a")}}, [{"a": 1}], [{"x": 1}]),
    "inherited": ({"allOf": [ref("o"), listed("b", required=["b"])], "$defs": {"o": listed("a")}},
                  [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1, "b": 2, "x": 3}]),
    "inherited twice": ({"allOf": [ref("p"), listed("c")], "$defs": {"o": listed("a"), "p": {"allOf": [
        ref("o"), listed("b")]}}}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "x": 3}]),
    "beside a reference": ({**listed("b"), **ref("o"), "$defs": {"o": listed("a")}}, [{"b": 1, "a": 2}], [{"x": 1}]),
    "one of several required": (listed("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
                                [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{"a": 1, "x": 1}]),
    "open part": ({"allOf": [listed("a", additionalProperties=True), listed("b")]}, [{"a": 1, "b": 2}], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("strict", [True, False])
def test_an_object_has_no_property_that_its_schema_does_not_mention(
    compiler: GrammarCompiler, name: str, strict: bool
) -> None:
    schema, good, bad = SCHEMAS[name]
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict)
    for value in (*good, *bad):
        Draft202012Validator(schema).validate(value)
    for value in good:
        assert accepts(compiler.start_grammar(grammar), json.dumps(value).encode()), value
    for value in bad:
        assert not accepts(compiler.start_grammar(grammar), json.dumps(value).encode()), value


def test_it_closes_the_same_beside_tools(compiler: GrammarCompiler) -> None:
    held = Grammar.tool_calls(
        [('{"name": "f", "arguments": ', json.dumps(listed("a")), "}")],
        optional="",
        otherwise=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(listed("b"))),
    )
    for text, allowed in (
        ('{"b": 1}', True),
        ('{"b": 1, "x": 1}', False),
        ('{"name": "f", "arguments": {"a": 1}}', True),
        ('{"name": "f", "arguments": {"a": 1, "x": 1}}', False),
    ):
        assert accepts(compiler.start_grammar(held), text.encode()) == allowed, text


def test_a_minimum_of_properties_that_the_listed_ones_cannot_reach_keeps_an_object_open() -> None:
    open_object = listed("a", minProperties=2)
    assert closed(open_object) == open_object


def test_no_references_make_it_slow_or_endless() -> None:
    chain = {f"a{n}": {"anyOf": [ref(f"a{n + 1}"), ref(f"a{n + 1}")], "properties": {f"p{n}": {}}} for n in range(500)}
    closed({**ref("a0"), "$defs": {**chain, "a500": listed("a")}})
    closed({"allOf": [{"$ref": "#"}, listed("a")], "properties": {"x": {"$ref": "#"}, "y": {"$ref": "#/nowhere"}}})
