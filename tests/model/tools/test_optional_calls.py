"""Optional calls: in any text that the grammar allows, the parser finds no call whose arguments do not fit."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import jsonschema
import pytest

from serve_app.contracts.generation import Ending, Grammar, GrammarKind, Part, Reasoning
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from serve_app.engine.text.detokenizer import Detokenizer, Vocabulary
from serve_app.model.tools.call_grammars import optional_calls, required_calls
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.parser import merged
from serve_app.model.tools.reasoning import Markers
from serve_app.model.tools.tool_format import ToolFormat
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import next_tokens
from tests.model.tools.reading import Call, summary

THINK = Markers("<think>", "</think>")
MARKERS = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers} | {THINK.begin, THINK.end})
WIDTH = EOS + 1 + len(MARKERS)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
LIKE_CALLS = [
    '{"name": "get_weather", "arguments": {"town": 1}}',
    '{"name": "get_weather", "parameters": {"town": 1}}',
    '[{"name": "get_weather", "arguments": {}}]',
    '{"name": "get_weather", "arguments": {"city": "Rome"}}',
    '{"name": "get_time", "arguments": {"a": 1}}',
    "```json\n",
    "```",
    "\n",
    "function",
    "get_weather",
    '{"city": "Oslo"}',
    "Hello, ",
    "[",
    "{",
    " ",
]


@cache
def vocabulary(special: bool) -> Vocabulary:
    """Bytes; with `special`, every marker is a special token too."""
    tokenizer = deepcopy(byte_tokenizer())
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    return Vocabulary(tokenizer)


@pytest.fixture(scope="module", params=[False, True], ids=["markers as text", "markers as special tokens"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary(request.param).tokenizer, WIDTH, frozenset({EOS}))
    compiler.special = request.param  # type: ignore[attr-defined]
    yield compiler
    compiler.close()


def walk(state: GrammarState, words: list[list[int]], rng: random.Random) -> tuple[list[int], str]:
    """A reply of allowed tokens, words where possible; and why it ended."""
    tokens: list[int] = []
    while len(tokens) < 120 and not state.finished:
        allowed = next_tokens(state)
        assert allowed, f"a dead end after {tokens}"
        if EOS in allowed and rng.random() < 0.1:
            return tokens, "stop"
        word = rng.choice([*words, [rng.choice(sorted(allowed))]])
        part = [
            token for token in word[: rng.choice([len(word), len(word), rng.randint(1, len(word))])] if token != EOS
        ]
        for token in state.allowed_part(part):
            tokens.append(token)
            state.accept(token)
            assert state.error is None
    return tokens, "stop" if state.finished else "length"


def words_of(form: ToolFormat, names: dict[str, int]) -> list[list[int]]:
    """The pieces of a reply: markers, and pieces of calls that fit and that do not fit."""
    arguments = [("get_weather", '{"city": "Rome"}'), ("get_weather", "{}"), ("get_time", '{"a": [1]}')]
    calls = [form.opening + body.join(form.around(name)) + form.closing for name, body in arguments]
    calls += [arguments[0][1].join(form.around("get_weather")), form.opening, form.closing]
    texts = [*calls, *calls, *calls, *MARKERS, *LIKE_CALLS, form.separator or "; "]
    return [spelled(text, names) for text in texts if text] + [list(text.encode()) for text in MARKERS]


def spelled(text: str, names: dict[str, int]) -> list[int]:
    tokens: list[int] = []
    while text:
        name = next((n for n in names if text.startswith(n)), None)
        tokens += [names[name]] if name else text[0].encode()
        text = text[len(name or text[0]) :]
    return tokens


def read(
    form: ToolFormat, special: bool, tokens: list[int], reason: str, reasons: bool = False, json: bool = False
) -> list[str | Call]:
    """The calls and text that a reader finds; with `json`, a reply without calls must be JSON."""
    detokenizer = Detokenizer(vocabulary(special), shown=(*form.markers, *([THINK.begin, THINK.end] * reasons)))
    only_first = json or not form.begins
    parser = form.parser(("get_weather", "get_time"), 0, only_first, THINK if reasons else None)
    parts: list[Part] = [part for token in tokens for part in parser.feed(detokenizer.push(token))]
    parts += [*parser.feed(detokenizer.finish()), *parser.feed_end(reason)]
    return summary(merged(part for part in parts if not isinstance(part, Reasoning)))


def grammar_of(form: ToolFormat, otherwise: Grammar | None, reasons: bool) -> Grammar:
    shown = (THINK.begin, THINK.end) if reasons else ()
    return optional_calls(form, TOOLS, otherwise=otherwise, shown=shown)


REPLIES = [
    (None, False),
    (None, True),
    # With a grammar for the whole reply, reasoning comes before its lead.
    (Grammar(GrammarKind.JSON_OBJECT), False),
    (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), False),
]
"""The grammar of a reply without calls, and whether it may begin with reasoning."""


@pytest.mark.parametrize("walks", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_no_reply_has_a_call_that_was_not_held_to_its_schema(
    tool_format: str, walks: int, compiler: GrammarCompiler
) -> None:
    rng = random.Random(tool_format)
    chosen, special = TOOL_FORMATS[tool_format], compiler.special  # type: ignore[attr-defined]
    words = words_of(chosen, vocabulary(special).special_names)
    found = 0
    for other, reasons in REPLIES * walks:
        grammar = grammar_of(chosen, other, reasons)
        tokens, reason = walk(compiler.start_grammar(grammar), words, rng)
        parts = read(chosen, special, tokens, reason, reasons, other is not None)
        for part in parts:
            if isinstance(part, Call):
                assert part.ending is Ending.COMPLETE or reason == "length"
                if part.ending is Ending.COMPLETE:
                    found += 1
                    jsonschema.validate(json.loads(part.arguments), SCHEMA if part.name == "get_weather" else {})
        if other is not None and reason == "stop" and not any(isinstance(part, Call) for part in parts):
            assert isinstance(json.loads("".join(str(part) for part in parts)), dict)
    assert found, "no call at all: nothing was tried"


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_reply_may_be_text_calls_or_where_they_are_marked_text_and_then_calls(
    tool_format: str, compiler: GrammarCompiler
) -> None:
    chosen, special = TOOL_FORMATS[tool_format], compiler.special  # type: ignore[attr-defined]
    grammar = grammar_of(chosen, None, False)
    call = '{"city": "Rome"}'.join(chosen.around("get_weather"))
    one = chosen.opening + call + chosen.closing
    several = chosen.opening + f"{call}{chosen.separator}{call}" + chosen.closing
    expected = Call("get_weather", '{"city": "Rome"}')
    for text, parts in (
        ("Hello [1] {} ```", ["Hello [1] {} ```"]),
        (one, [expected]),
        *([(several, [expected, expected])] if chosen.separator is not None else []),
        *([("Let me see.\n\n" + one, ["Let me see.", expected])] if chosen.begins else []),
    ):
        tokens, state = spelled(text, vocabulary(special).special_names), compiler.start_grammar(grammar)
        for token in tokens:
            assert token in next_tokens(state), text
            state.accept(token)
        assert EOS in next_tokens(state)
        assert read(chosen, special, tokens, "stop") == parts


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_forced_calls_after_open_reasoning_are_read_as_calls_and_nothing_else(
    tool_format: str, compiler: GrammarCompiler
) -> None:
    rng = random.Random(tool_format)
    chosen, special = TOOL_FORMATS[tool_format], compiler.special  # type: ignore[attr-defined]
    calls = dataclasses.replace(required_calls(chosen, TOOLS), lead=THINK.end)
    words = words_of(chosen, vocabulary(special).special_names)
    for _ in range(4):
        tokens, reason = walk(compiler.start_grammar(calls), words, rng)
        detokenizer = Detokenizer(vocabulary(special), shown=(*chosen.markers, THINK.begin, THINK.end))
        parser = chosen.parser(("get_weather", "get_time"), markers=THINK, left_open=True)
        parts = [part for token in tokens for part in parser.feed(detokenizer.push(token))]
        parts += [*parser.feed(detokenizer.finish()), *parser.feed_end(reason)]
        read_parts = summary(merged(part for part in parts if not isinstance(part, Reasoning)))
        if reason == "stop":
            assert read_parts
            assert all(isinstance(part, Call) and part.ending is Ending.COMPLETE for part in read_parts)


def test_a_reply_read_for_calls_at_its_beginning_only_has_none_later() -> None:
    plain, call = TOOL_FORMATS["plain"], '{"name": "get_time", "arguments": {}}'
    for text, expected in (
        (f"{call}\n{call}", [Call("get_time", "{}"), Call("get_time", "{}")]),
        (f" \n{call}\n", [Call("get_time", "{}")]),
        (f"Hello\n{call}\n{call} ", [f"Hello\n{call}\n{call} "]),
        (f"{call}\nHello\n{call}", [Call("get_time", "{}"), f"\nHello\n{call}"]),
    ):
        parser = plain.parser(("get_time",), only_first=True)
        assert summary(merged([*(p for c in text for p in parser.feed(c)), *parser.feed_end("stop")])) == expected
