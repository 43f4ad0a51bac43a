"""Optional tool calls: in any reply, only text that the grammar has checked can be read as a call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar.compiler import GrammarCompiler
from serve_app.engine.text.detokenizer import Detokenizer, Vocabulary
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, next_tokens
from tests.engine.test_grammar_lead import CALL, END, marked, spelled, takes

__all__ = ["marked"]

CITY = json.dumps(
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
)
ANY = '{"type": "object"}'


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def tagged(marker: str, **options: Any) -> Grammar:
    alternatives = [(f"{marker}weather ", CITY, "!"), (f"{marker}time ", ANY, "!")]
    return Grammar.tool_calls(alternatives, optional=marker, **options)


def bare(**options: Any) -> Grammar:
    around = [('{"name": "weather", "arguments": ', CITY, "}"), ('{"name": "time", "arguments": ', ANY, "}")]
    return Grammar.tool_calls(around, optional="", **options)


WEATHER, TIME = 'weather {"city": "Rome"}!', 'time {"zone": 1}!'
TEXTS = ["", "\n", "Hello, 汉 {}", "a <|call", "[1] `x`", '{"name": "weather"}']


@pytest.mark.parametrize("special", [False, True], ids=["text", "special token"])
def test_a_reply_may_be_text_or_calls_or_text_and_then_calls(
    compiler: GrammarCompiler, marked: GrammarCompiler, special: bool
) -> None:
    held, marker = marked if special else compiler, "<|call|>"

    def tokens(text: str) -> list[int]:
        return spelled(text) if special else list(text.encode())

    for text in TEXTS:
        one, several = tagged(marker), tagged(marker, separator="\n")
        assert takes(held.start_grammar(one), tokens(text))
        assert takes(held.start_grammar(one), tokens(text + marker + WEATHER))
        assert takes(held.start_grammar(several), tokens(f"{text}{marker}{WEATHER}\n{marker}{TIME}\n{marker}{WEATHER}"))
        assert not takes(held.start_grammar(one), tokens(f"{text}{marker}{WEATHER}\n{marker}{TIME}"))
        for wrong in ("other {}!", "weather {}!", "", WEATHER + "and text"):
            assert not takes(held.start_grammar(several), tokens(text + marker + wrong))


def test_what_stands_around_all_calls_does_so_once(compiler: GrammarCompiler) -> None:
    for optional in (None, "[", "[["):
        grammar = Grammar.tool_calls([("<", ANY, ">")], ", ", opening="[[", closing="]]", optional=optional)
        for text in ("[[<{}>]]", "[[<{}>, <{}>]]"):
            assert takes(compiler.start_grammar(grammar), list(text.encode()))
        for wrong in ("[[]]", "[[<{}>", "[[<{}>]][[<{}>]]", "[[<{}>, ]]"):
            assert not takes(compiler.start_grammar(grammar), list(wrong.encode()))


def test_a_reply_that_begins_like_a_call_without_a_marker_must_be_one(compiler: GrammarCompiler) -> None:
    weather, time = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "time", "arguments": {}}'
    for good in ("", "Hello {}", " \n ", "\n x", weather, f"\n{time}", f"{weather}\n{time}", "1", '"a"', "汉["):
        assert takes(compiler.start_grammar(bare(separator="\n")), list(good.encode())), good
    for wrong in ("{}", "[1]", "```", "\n {", ' \t["', '{"name": "weather", "arguments": {}}', f"{weather} text"):
        assert not takes(compiler.start_grammar(bare(separator="\n")), list(wrong.encode())), wrong


def test_text_has_nothing_that_readers_take_for_the_beginning_of_calls(
    compiler: GrammarCompiler, marked: GrammarCompiler
) -> None:
    grammar = tagged("<c>", never=["<d>", "<e>"], not_first="[", shown=["<t>"])
    for good in ("Hi <d", "{}", "a[", "<t>a[", "x <t>\n<c>" + WEATHER):
        assert takes(compiler.start_grammar(grammar), list(good.encode())), good
    for wrong in ("Hi <d>", "<e>", "[", "\n[", "a <t>[", "a<t>\n[", "<t>[<c>" + WEATHER):
        assert not takes(compiler.start_grammar(grammar), list(wrong.encode())), wrong
    # Only shown special tokens: any other is left out of the text, even between two halves of a marker.
    grammar = tagged("<c>", never=["<|call|>"], not_first="[", shown=["</think>", "<|call|>"])
    assert takes(marked.start_grammar(grammar), spelled("a</think>b"))
    assert takes(marked.start_grammar(grammar), spelled("a</think>b<c>" + WEATHER))
    assert not takes(marked.start_grammar(grammar), spelled("a</think>["))
    assert not takes(marked.start_grammar(grammar), list(b"<|call|>"))
    assert CALL not in next_tokens(marked.start_grammar(grammar))
    assert END not in next_tokens(marked.start_grammar(tagged("<c>")))


PERSON = (
    '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false}'
)


@pytest.mark.parametrize("grammar", [tagged("<c>"), bare()], ids=["marked", "bare"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_where_replies_must_be_json_they_are_json_or_calls(
    compiler: GrammarCompiler, grammar: Grammar, kind: str
) -> None:
    other = Grammar(GrammarKind.JSON_OBJECT) if kind == "json_object" else Grammar(GrammarKind.JSON_SCHEMA, PERSON)
    calls = json.loads(grammar.text)
    held = Grammar.tool_calls(calls["alternatives"], optional=calls["optional"], otherwise=other)
    call = '<c>weather {"city": "Rome"}!' if calls["optional"] else '{"name": "weather", "arguments": {"city": "Rome"}}'
    for good in (call, '{"age": 3}', *(['{"nam": {"name": [3]}}', "{}"] if kind == "json_object" else [])):
        assert takes(compiler.start_grammar(held), list(good.encode())), good
    for wrong in (
        "Hello",
        "",
        call.replace("city", "town"),
        '{"age": 3}' + call,
        *(["{}"] if kind != "json_object" else []),
    ):
        assert not takes(compiler.start_grammar(held), list(wrong.encode())), wrong


@pytest.mark.parametrize("key", ["name", r"\u006eame", r"na\u006de"])
def test_json_beside_calls_without_a_marker_can_not_be_taken_for_one(compiler: GrammarCompiler, key: str) -> None:
    grammar = bare(otherwise=Grammar(GrammarKind.JSON_OBJECT))
    for text in ('{"%s": "weather", "arguments": {}}', '{"a": 1, "%s": "weather", "arguments": {}}'):
        assert not takes(compiler.start_grammar(grammar), list((text % key).encode()))
    assert takes(compiler.start_grammar(bare(otherwise=Grammar(GrammarKind.JSON_SCHEMA, json.dumps({
        "type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False,
    })))), list(b'{"name": "Ada"}'))  # fmt: skip


@pytest.mark.parametrize(
    ("grammar", "message", "alternative"),
    [
        (Grammar.tool_calls([("a", ANY, ""), ("b", '{"not": {}}', "")]), "not", 1),
        (Grammar.tool_calls([("a", '{"type": "array", "uniqueItems": true}', "")], optional="a"), "uniqueItems", 0),
        (Grammar.tool_calls([("a", "[1]", "")], optional="a"), "must be an object", 0),
        (Grammar.tool_calls([], optional=""), "no tools", None),
        (Grammar.tool_calls([("a", ANY, "")], optional="b"), "do not all begin with", None),
        (tagged("<c>", otherwise=Grammar.tool_calls([("a", ANY, "")])), "only JSON", None),
        (tagged("<c>", otherwise=Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')), "not", None),
        (bare(otherwise=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}')), "type object", None),
        (bare(otherwise=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "anyOf": []}')), "at the top level", None),
        (
            bare(otherwise=Grammar(GrammarKind.JSON_SCHEMA, json.dumps({
                "type": "object", "properties": {"name": {}, "arguments": {}}, "additionalProperties": False,
            }))),
            "named like a call's",
            None,
        ),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_enforced_is_refused_and_names_the_tool(
    compiler: GrammarCompiler, grammar: Grammar, message: str, alternative: int | None
) -> None:
    with pytest.raises(UnsupportedGrammar, match=message) as caught:
        compiler.compile(grammar)
    assert caught.value.alternative == alternative


@pytest.mark.model
@pytest.mark.parametrize(
    ("lead", "marker"), [("", "<tool_call>"), ("</think>", "```json\n"), ("</think>", "<|im_start|>")]
)
def test_random_replies_in_the_bundled_models_tokens_have_only_calls_that_fit(
    bundled_compiler: GrammarCompiler, bundled_tokenizer: Any, marker: str, lead: str
) -> None:
    tokenizer, vocabulary = bundled_tokenizer, Vocabulary(bundled_tokenizer)
    grammar = tagged(marker, separator="\n", lead=lead)
    words = [
        f"{marker}{WEATHER}",
        f"{marker}{TIME}",
        marker,
        "weather",
        '{"city": "',
        '"}!',
        "\n",
        '{"zone',
        "</think>",
    ]
    pieces = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    rng = random.Random(f"{marker}{lead}")
    called = 0
    for _ in range(8):
        state = bundled_compiler.start_grammar(grammar)
        tokens: list[int] = []
        while len(tokens) < 60 and not state.finished:
            allowed = np.unpackbits(state.masks()[0].numpy().view(np.uint8), bitorder="little").nonzero()[0]
            assert len(allowed)
            for token in state.allowed_part(rng.choice([*pieces, [int(rng.choice(allowed))]])):
                if token == tokenizer.eos_token_id:
                    break
                state.accept(token)
                tokens.append(token)
        detokenizer = Detokenizer(vocabulary, shown=(marker,))
        text = "".join(map(detokenizer.push, tokens))
        if lead:
            if lead not in text:
                continue
            text = text.split(lead, 1)[1]
        while marker in text:
            text = text.split(marker, 1)[1]
            name, _, rest = text.partition(" ")
            assert name in ("weather", "time") or not rest
            try:
                arguments, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                assert not state.finished
                break  # the walk ended within it
            assert name == "time" or (arguments.keys() == {"city"} and isinstance(arguments["city"], str))
            called += 1
            text = rest[end:]
            assert re.match("!(\n|$)", text) or not text
    assert called
