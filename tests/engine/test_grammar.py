"""Grammars over a tokenizer of single bytes, for which a test can list what a mask must allow."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar.compiler import Compiled, GrammarCompiler, GrammarState
from tests.engine.fakes import EOS, byte_tokenizer

PADDED = 300  # the logits are wider than the tokenizer's 257


class PatternCompiler(GrammarCompiler):
    """Also compiles `regex`: its masks are easier to write by hand than those of JSON."""

    def _compile(self, grammar: Grammar) -> Compiled:
        if not grammar.text.startswith("regex:"):
            return super()._compile(grammar)
        source = LLMatcher.grammar_from_regex(grammar.text.removeprefix("regex:"))
        return Compiled(source, LLMatcher(self._tokenizer(), source, log_level=0, limits=self._limits))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, f"regex:{text}")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = PatternCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def schema(**keywords: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(keywords))


def allowed(row: torch.Tensor) -> set[int]:
    return set(np.unpackbits(row.numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist())


def next_tokens(state: GrammarState) -> set[int]:
    (row,) = state.masks()
    return allowed(row)


def said(state: GrammarState, text: bytes) -> GrammarState:
    for byte in text:
        state.accept(byte)
    return state


def accepts(state: GrammarState, text: bytes) -> bool:
    """Returns whether each byte is allowed in its turn, and the end after the last."""
    for byte in text:
        if byte not in next_tokens(state):
            return False
        state.accept(byte)
    return EOS in next_tokens(state)


@pytest.mark.parametrize(
    ("pattern", "before", "expected"),
    [
        ("ab|ac", b"", {ord("a")}),
        ("ab|ac", b"a", {ord("b"), ord("c")}),
        ("ab|ac", b"ab", {EOS}),
        ("[0-9]+x?", b"", set(b"0123456789")),
        ("[0-9]+x?", b"7", {*b"0123456789x", EOS}),
        ("a{2,3}", b"aa", {ord("a"), EOS}),
        ("é", b"", {"é".encode()[0]}),
        ("é", "é".encode()[:1], {"é".encode()[1]}),
    ],
)
def test_a_mask_allows_exactly_what_may_come_next(
    compiler: GrammarCompiler, pattern: str, before: bytes, expected: set[int]
) -> None:
    assert next_tokens(said(compiler.start_grammar(regex(pattern)), before)) == expected


def test_masks_are_as_wide_as_the_logits_and_never_allow_padding(compiler: GrammarCompiler) -> None:
    masks = compiler.start_grammar(regex("(?s:.*)")).masks()
    assert masks.shape == (1, -(-PADDED // 32))
    assert masks.dtype == torch.int32
    assert max(allowed(masks[0])) == EOS


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    state = compiler.start_grammar(regex("a(bc)*"))
    ends = [EOS in next_tokens(state)]
    for byte in b"abcbc":
        state.accept(byte)
        ends.append(EOS in next_tokens(state))
    assert ends == [False, True, False, True, False, True]


def test_a_complete_grammar_is_finished_and_allows_the_end_alone(compiler: GrammarCompiler) -> None:
    state = compiler.start_grammar(regex("ab?"))
    assert not said(state, b"a").finished
    assert said(state, b"b").finished
    assert next_tokens(state) == {EOS}
    state.accept(EOS)
    assert state.finished
    assert state.error is None


def test_masks_of_a_draft_are_those_of_its_tokens_accepted_one_by_one(compiler: GrammarCompiler) -> None:
    text = b'{"a": [1, {"b": "x"}], "c": -2.5e3}'
    state = compiler.start_grammar(Grammar(GrammarKind.JSON_OBJECT))
    for start in range(0, len(text), 5):
        draft = tuple(text[start : start + 7])
        state.prepare(draft)
        masks = state.masks(draft)
        for row, end in zip(masks, range(start, start + 1 + len(draft)), strict=True):
            alone = said(compiler.start_grammar(Grammar(GrammarKind.JSON_OBJECT)), text[:end])
            assert allowed(row) == next_tokens(alone)
        said(state, text[start : start + 5])
    assert state.finished


def test_a_draft_leaves_the_grammar_where_it_was_however_far_it_leads(compiler: GrammarCompiler) -> None:
    for draft in (b"abc", b"ab", b"ax", b"abcabc", bytes([ord("a"), ord("b")])):
        state = compiler.start_grammar(regex("abc|abd"))
        before = next_tokens(state)
        state.prepare((*draft, EOS))
        state.masks((*draft, EOS))
        assert next_tokens(state) == before
        assert accepts(state, b"abd")


def test_rows_behind_a_forbidden_draft_token_forbid_nothing_and_a_complete_one_wants_the_end(
    compiler: GrammarCompiler,
) -> None:
    masks = compiler.start_grammar(regex("ab")).masks(tuple(b"aXb"))
    assert allowed(masks[0]) == {ord("a")}
    assert allowed(masks[1]) == {ord("b")}
    assert bool((masks[2:] == -1).all())
    masks = compiler.start_grammar(regex("ab")).masks((*b"ab", EOS))
    assert allowed(masks[2]) == {EOS}


def test_masks_that_were_prepared_for_another_draft_are_computed_anew(compiler: GrammarCompiler) -> None:
    state = compiler.start_grammar(regex("abc|xyz"))
    state.prepare(tuple(b"ab"))
    assert [allowed(row) for row in state.masks(tuple(b"xy"))] == [set(b"ax"), set(b"y"), set(b"z")]
    state.prepare(tuple(b"ab"))
    assert [allowed(row) for row in state.masks(tuple(b"a"))] == [set(b"ax"), set(b"b")]


def test_forced_tokens_are_those_that_must_come(compiler: GrammarCompiler) -> None:
    state = compiler.start_grammar(schema(type="object", properties={"name": {"const": "Eve"}}, required=["name"],
                                  additionalProperties=False))  # fmt: skip
    said(state, b'{"')
    assert bytes(state.forced()).startswith(b'name"')
    state.masks(state.forced())
    assert accepts(state, b'name":"Eve"}')
    assert compiler.start_grammar(regex("[ab]")).forced() == ()
    assert said(compiler.start_grammar(regex("a")), b"a").forced() == ()


def test_a_token_that_is_not_allowed_is_an_error_after_which_nothing_is(compiler: GrammarCompiler) -> None:
    state = said(compiler.start_grammar(regex("ab")), b"x")
    assert state.error
    assert next_tokens(state) == set()
    assert not state.finished
    state.prepare((1, 2))
    assert not state.masks((1, 2)).any()
    state.accept(1)
    assert state.forced() == ()


@pytest.mark.parametrize(
    "text",
    ["{}", '{"a":1}', '{"a": [true, null, -1.5e9, "x\\n\\"é"], "b": {}}', '{\n  "a": {\n    "b": []\n  }\n}'],
)
def test_json_mode_accepts_json_objects(compiler: GrammarCompiler, text: str) -> None:
    state = compiler.start_grammar(Grammar(GrammarKind.JSON_OBJECT))
    assert accepts(state, text.encode())
    assert state.finished


@pytest.mark.parametrize("text", ["[]", "1", "{}{}", " {}", "{a:1}", '{"a":1,}', '{"a":\n\n1}', "{'a':1}"])
def test_json_mode_accepts_nothing_but_json_objects(compiler: GrammarCompiler, text: str) -> None:
    assert not accepts(compiler.start_grammar(Grammar(GrammarKind.JSON_OBJECT)), text.encode())


WEATHER = json.dumps(
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
)
CALLS = [('{"name": "weather", "arguments": ', WEATHER, "}"), ('{"name": "time", "arguments": ', "{}", "}")]


def test_a_forced_tool_call_is_one_of_the_tools_with_arguments_of_its_schema(compiler: GrammarCompiler) -> None:
    grammar = Grammar.tool_calls(CALLS)
    assert accepts(compiler.start_grammar(grammar), b'{"name": "weather", "arguments": {"city": "Rome"}}')
    assert accepts(compiler.start_grammar(grammar), b'{"name": "time", "arguments": [1]}')
    for wrong in (
        b'{"name": "weather", "arguments": {"town": "Rome"}}',
        b'{"name": "rain", "arguments": {}}',
        b"Hello",
    ):
        assert not accepts(compiler.start_grammar(grammar), wrong)
    one = b'{"name": "time", "arguments": 1}'
    assert not accepts(compiler.start_grammar(grammar), one + b"\n" + one)
    assert accepts(compiler.start_grammar(Grammar.tool_calls(CALLS, separator="\n")), one + b"\n" + one)


def test_special_tokens_in_the_texts_around_a_tool_call_are_tokens_and_not_their_letters(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.start_grammar(Grammar.tool_calls([('<eos>"', "true", "")]))
    assert next_tokens(state) == {EOS}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(**{"not": {}, "if": {"type": "string"}}), "if, not|not, if"),
        (schema(type="object", properties={"a": {"contains": {}}}), "contains"),
        (schema(type="string", format="phone"), "phone"),
        (schema(items={"type": "object", "minProperties": 2}), "minProperties"),
        (schema(oneOf=[{"type": "number"}, {"type": "integer"}]), "oneOf.*anyOf"),
        (schema(**{"$ref": "http://example.org/x"}), r"\$ref"),
        (schema(type="string", pattern="(?=a)b"), "look-around"),
        (schema(type="integer", minimum=5, maximum=3), "minimum"),
        (schema(**{"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{bad"), "json_schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1]"), "must be an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "false"), "must be an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"a":' * 100_000), "nested too deeply"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 700 + "{}" + "}" * 700), "nested|recursion"),
        (schema(type="string", pattern="a("), "regular expression"),
        (Grammar.tool_calls([]), "no tools"),
        (Grammar.tool_calls([("a", '{"not": {}}', "b")]), "not"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_enforced_is_refused_and_named(
    compiler: GrammarCompiler, grammar: Grammar, message: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match=message) as caught:
        compiler.compile(grammar)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_a_schema_that_need_not_be_strict_ignores_what_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    grammar = dataclasses.replace(schema(type="array", uniqueItems=True), strict=False)
    assert accepts(compiler.start_grammar(grammar), b"[1,1]")


@pytest.mark.parametrize("text", ["a b", "<x>", "é\n", "$1.00 (net)", "#-~&/", "[a]{2}|^", "\\n"])
def test_a_reply_is_one_of_the_texts_of_a_choice(compiler: GrammarCompiler, text: str) -> None:
    grammar = Grammar(GrammarKind.REGEX, "|".join(map(re.escape, ["other", text])))
    assert accepts(compiler.start_grammar(grammar), text.encode())
    assert not accepts(compiler.start_grammar(grammar), text.encode() + b"x")


@pytest.mark.parametrize(("pattern", "why"), [("(?=a)b", "look-around"), ("a(", "unclosed"), (r"a\bc", "word bound")])
def test_a_regular_expression_that_cannot_be_enforced_is_refused(
    compiler: GrammarCompiler, pattern: str, why: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match=f"unsupported in a regular expression: .*{why}"):
        compiler.compile(Grammar(GrammarKind.REGEX, pattern))


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
LENIENT = [
    ({"type": "string", "pattern": ZOD_EMAIL}, ['"x"', '"a@b.de"'], ["1"]),
    ({"type": "string", "pattern": r"^(a)\1$", "maxLength": 2}, ['"xy"'], ['"xyz"']),
    ({"type": "string", "pattern": r"\bfoo\b"}, ['"x"'], ["1"]),
    ({"type": "string", "pattern": "^(?=x)", "enum": ["x", "y"]}, ['"x"', '"y"'], ['"z"']),
    ({"type": ["string", "null"], "pattern": "(?!x)"}, ['"x"', "null"], ["1"]),
    ({"type": "string", "pattern": "^(ab|ba)*$", "minLength": 2000, "maxLength": 3000}, [f'"{"ab" * 1000}"'], ['"x"']),
    ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
    ({"type": "string", "format": "binary"}, ['"x"'], ["1"]),
    ({"type": "array", "items": {"type": "string", "pattern": "(?!x)"}, "uniqueItems": True}, ['["x","x"]'], ["[1]"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["1"], ["1.5"]),
    ({"type": "string", "maxLength": 10**12}, ['"x"'], ["1"]),
    ({"patternProperties": {"^(?!x)": {"type": "integer"}, "^b": {"type": "null"}}, "type": "object",
      "additionalProperties": False}, ['{"b":null,"c":"d"}'], ['{"b":1}']),
    ({"anyOf": [{"type": "string", "pattern": "(?!x)"}, {"type": "boolean"}]}, ['"x"', "true"], ["1"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "(?!x)"}}}, ['"x"'], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "good", "bad"), LENIENT, ids=lambda value: json.dumps(value)[:60])
def test_a_keyword_that_cannot_be_enforced_is_left_out_and_the_rest_is_enforced(
    compiler: GrammarCompiler, keywords: dict[str, object], good: list[str], bad: list[str]
) -> None:
    loose = dataclasses.replace(schema(**keywords), strict=False)
    strict = dataclasses.replace(schema(type="object", properties={"x": keywords}, required=["x"]))
    calls = Grammar.tool_calls([("<", json.dumps(keywords), ">")], lenient=[0])
    for text in good:
        assert accepts(compiler.start_grammar(loose), text.encode()), text
        assert accepts(compiler.start_grammar(calls), f"<{text}>".encode()), text
    for text in bad:
        assert not accepts(compiler.start_grammar(loose), text.encode()), text
        assert not accepts(compiler.start_grammar(calls), f"<{text}>".encode()), text
    if keywords.get("maxLength") != 10**12:
        with pytest.raises(UnsupportedGrammar, match=r"properties\.x|patterns"):
            compiler.compile(strict)


@pytest.mark.parametrize(
    "keywords",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "^[A-Z]{3}$", "minLength": 5},
        {"$ref": "#/nowhere"},
        {"type": "banana"},
    ],
    ids=str,
)
def test_a_schema_that_nothing_fits_is_refused_strict_or_not(
    compiler: GrammarCompiler, keywords: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedGrammar):
        compiler.compile(dataclasses.replace(schema(**keywords), strict=False))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look-around, including look-ahead"),
        ({"type": "string", "pattern": r"\bx"}, "word boundaries"),
        ({"type": "string", "pattern": "a("}, "unclosed group"),
        ({"type": "string", "format": "password"}, "Unknown format: password"),
        ({"type": "array", "uniqueItems": True}, "unsupported keywords in the JSON schema: uniqueItems"),
    ],
    ids=str,
)
def test_a_fault_of_a_tools_schema_is_named_by_its_path_and_in_the_users_terms(
    compiler: GrammarCompiler, keywords: dict[str, object], message: str
) -> None:
    faulty = json.dumps({"type": "object", "properties": {"at": {"type": "array", "items": keywords}}})
    with pytest.raises(UnsupportedGrammar, match=message) as caught:
        compiler.compile(Grammar.tool_calls([("a", "{}", "b"), ("c", faulty, "d")]))
    assert caught.value.alternative == 1
    assert str(caught.value).startswith("properties.at.items.")


AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"type": "string"}},
    "additionalProperties": True,
}


@pytest.mark.parametrize(
    "keywords",
    [
        AGE,
        {**AGE, "required": ["age"]},
        {**AGE, "additionalProperties": {"type": ["string", "integer"]}},
        {"properties": AGE["properties"], "additionalProperties": True},
        {"anyOf": [AGE, {"type": "null"}]},
        {"$defs": {"a": AGE}, "$ref": "#/$defs/a"},
    ],
    ids=str,
)
def test_a_property_fits_its_schema_even_if_its_name_is_escaped(
    compiler: GrammarCompiler, keywords: dict[str, object]
) -> None:
    good = ['{"age": 1}', '{"age": 1, "ages": "x"}', '{"age": 1, "ag": "x", "na\\n": 2}', '{"age": 1, "": "x", "é": 3}']
    for text in good:
        assert accepts(compiler.start_grammar(schema(**keywords)), text.encode()), text
    for key in ("age", r"\u0061ge", r"a\u0067e", r"\u0061\u0067\u0065"):
        assert not accepts(compiler.start_grammar(schema(**keywords)), f'{{"age": 1, "{key}": "x"}}'.encode()), key
    if "$ref" not in keywords:
        nested = schema(type="array", items=keywords)
        assert accepts(compiler.start_grammar(nested), f"[{good[1]}]".encode())
        assert not accepts(compiler.start_grammar(nested), b'[{"age": 1, "\\u0061ge": "x"}]')


@pytest.mark.parametrize("text", [r"\ud83d", r"\ude00\ud83d", r"\ud83d\ude00"])
def test_no_half_of_a_character_is_spelled_in_json(compiler: GrammarCompiler, text: str) -> None:
    for grammar in (schema(type="object"), schema(enum=["x", {"a": "b"}]), Grammar(GrammarKind.JSON_OBJECT)):
        assert not accepts(compiler.start_grammar(grammar), f'{{"a": "{text}"}}'.encode())
        assert not accepts(compiler.start_grammar(grammar), f'{{"a{text}": "b"}}'.encode())


def test_the_schema_that_allows_everything_is_a_schema(compiler: GrammarCompiler) -> None:
    assert accepts(compiler.start_grammar(Grammar(GrammarKind.JSON_SCHEMA, "true")), b"[1]")


def test_a_grammar_is_compiled_once_and_its_replies_are_independent(compiler: GrammarCompiler) -> None:
    grammar = regex("once(a|b)")
    first, second = compiler.start_grammar(grammar), compiler.start_grammar(grammar)
    assert compiler.compile(grammar) is compiler.compile(regex("once(a|b)"))
    said(first, b"oncea")
    assert first.finished
    assert accepts(second, b"onceb")


def test_the_cache_forgets_what_was_not_used_for_longest(compiler: GrammarCompiler) -> None:
    kept, lost = regex("kept"), regex("lost")
    first, old = compiler.compile(kept), compiler.compile(lost)
    for number in range(80):
        compiler.compile(regex(f"n{number}"))
        compiler.compile(kept)
    assert compiler.compile(kept) is first
    assert compiler.compile(lost) is not old


def test_many_threads_may_start_grammars_at_once(compiler: GrammarCompiler) -> None:
    states: list[GrammarState] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        for number in range(20):
            states.append(compiler.start_grammar(regex(f"thread{number}")))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states:
        state.prepare()
    assert len(states) == 160
    assert all(next_tokens(state) == {ord("t")} for state in states)
