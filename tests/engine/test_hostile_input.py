"""Hostile schemas and prompts are refused or compiled soon, on the bundled model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.api.json_schemas import check_schema
from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.errors import ContextLengthExceeded, UnsupportedGrammar
from serve_app.engine.grammar.compiler import GrammarCompiler
from serve_app.engine.text.detokenizer import StopFinder
from tests.malformed.row import Row
from tests.malformed.schemas import LARGEST, rows
from tests.processor_time import at_most

CONTEXT = 32768
SOON_S = 1.0  # of this thread's processor time
TOO_LONG = {
    "words": "the quick brown fox " * 200_000,
    "one letter": "a" * 3_900_000,
    "no blanks": "abcdefghijklmnopqrstuvwxyz" * 150_000,
    "digits": "1234567890" * 390_000,
    "Chinese": "\u4e2d\u6587" * 600_000,
    "emoji": "\U0001f469\u200d\U0001f467" * 300_000,
    "punctuation": "!?" * 1_900_000,
    "marks of the template": "<|im_start|>" * 320_000,
    "line ends": "\n" * 3_900_000,
}


@pytest.fixture(scope="module")
def compiler(bundled_tokenizer: Any) -> Iterator[GrammarCompiler]:
    tokenizer = bundled_tokenizer
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT, ""))  # makes the tokenizer's tables
    yield compiler
    compiler.close()


def schema_of(row: Row) -> Grammar:
    schema = json.loads(row.raw)["response_format"]["json_schema"]["schema"]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("row", [row for row in rows() if row.by_model], ids=lambda row: row.name)
def test_a_schema_that_can_not_be_enforced_is_refused_in_time_and_says_why(compiler: GrammarCompiler, row: Row) -> None:
    with at_most(SOON_S), pytest.raises(UnsupportedGrammar) as caught:
        compiler.compile(schema_of(row))
    for words in row.says:
        assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_schemas_that_are_taken_compile_in_time(compiler: GrammarCompiler, name: str) -> None:
    schema = LARGEST[name]
    check_schema("schema", schema)
    with at_most(5 * SOON_S):
        state = compiler.start_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for _ in range(5):
        with at_most(SOON_S / 2):
            [row] = state.masks()
        assert state.error is None
        first = int(row.ne(0).nonzero()[0])
        word = int(row[first])
        state.accept(first * 32 + (word & -word).bit_length() - 1)


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_prompt_that_is_far_too_long_is_refused_in_time(bundled_tokenizer: Any, kind: str) -> None:
    renderer = ChatRenderer(bundled_tokenizer, CONTEXT)
    with at_most(3 * SOON_S), pytest.raises(ContextLengthExceeded):
        renderer.render([{"role": "user", "content": TOO_LONG[kind]}])


@pytest.mark.parametrize("repeated", ["the quick brown fox ", "\u4e2d", " ", "="])
def test_a_long_prompt_is_refused_only_if_it_does_not_fit(bundled_tokenizer: Any, repeated: str) -> None:
    whole = ChatRenderer(bundled_tokenizer)
    characters = CONTEXT * 8 + 1000  # long enough to be looked at in pieces
    text = repeated * (characters // len(repeated))
    tokens = len(whole.tokenize(text))
    assert len(ChatRenderer(bundled_tokenizer, tokens).tokenize(text)) == tokens


def test_stop_strings_that_nearly_come_cost_no_more_than_others() -> None:
    """By trying every length of every string, the 4,096th of these tokens would take a second."""
    finder = StopFinder(["a" * 250_000, *("a" * (100 + number) + "b" * 200_000 for number in range(15))])
    with at_most(4 * SOON_S):
        assert "".join(finder.push("a" * 8) for _ in range(4096)) == ""
        assert finder.flush() == "a" * 8 * 4096
