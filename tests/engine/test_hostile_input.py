"""Hostile schemas, prompts and stop strings cost little, on the bundled model's own tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.json_schemas import check_schema
from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.errors import ContextLengthExceeded, UnsupportedGrammar
from serve_app.engine.grammar.compiler import GrammarCompiler
from serve_app.engine.text.detokenizer import StopFinder
from tests.engine.counted import Counted
from tests.malformed.row import Row
from tests.malformed.schemas import LARGEST, rows

CONTEXT = 4096
TOO_LONG = {
    "words": "the quick brown fox " * 25_000,
    "one letter": "a" * 480_000,
    "no blanks": "abcdefghijklmnopqrstuvwxyz" * 18_000,
    "digits": "1234567890" * 48_000,
    "Chinese": "\u4e2d\u6587" * 75_000,
    "emoji": "\U0001f469\u200d\U0001f467" * 37_000,
    "punctuation": "!?" * 240_000,
    "marks of the template": "<|im_start|>" * 40_000,
    "line ends": "\n" * 480_000,
}


def schema_of(row: Row) -> Grammar:
    schema = json.loads(row.raw)["response_format"]["json_schema"]["schema"]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("row", [row for row in rows() if row.by_model], ids=lambda row: row.name)
def test_a_schema_that_can_not_be_enforced_is_refused_and_says_why(bundled_compiler: GrammarCompiler, row: Row) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        bundled_compiler.compile(schema_of(row))
    for words in row.says:
        assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_schemas_that_are_taken_compile_and_give_masks(
    bundled_compiler: GrammarCompiler, name: str
) -> None:
    schema = LARGEST[name]
    check_schema("schema", schema)
    state = bundled_compiler.start_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for _ in range(5):
        [row] = state.masks()
        assert state.error is None
        first = int(row.ne(0).nonzero()[0])
        word = int(row[first])
        state.accept(first * 32 + (word & -word).bit_length() - 1)


class Counting:
    """A tokenizer's core that counts the characters it is given, with only the call that releases the GIL."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._core.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("kind", TOO_LONG)
def test_of_a_prompt_that_is_far_too_long_only_the_beginning_is_tokenized(bundled_tokenizer: Any, kind: str) -> None:
    renderer = ChatRenderer(bundled_tokenizer, CONTEXT)
    renderer._core = counting = Counting(renderer._core)
    with pytest.raises(ContextLengthExceeded, match=f"more than {CONTEXT} tokens") as refusal:
        renderer.render([{"role": "user", "content": TOO_LONG[kind]}])
    assert refusal.value.prompt_tokens == 0  # a count of the beginning is not the prompt's
    assert counting.characters < len(TOO_LONG[kind]) / 4


def test_other_threads_run_while_a_long_prompt_is_tokenized(bundled_tokenizer: Any) -> None:
    renderer = ChatRenderer(bundled_tokenizer)
    renderer._core = counting = Counting(renderer._core)
    assert renderer.tokenize("words " * 1000) == bundled_tokenizer("words " * 1000)["input_ids"]
    assert counting.characters == 6000


@pytest.mark.parametrize("repeated", ["the quick brown fox ", "\u4e2d", " ", "="])
def test_a_long_prompt_is_refused_only_if_it_does_not_fit(bundled_tokenizer: Any, repeated: str) -> None:
    whole = ChatRenderer(bundled_tokenizer)
    characters = CONTEXT * 8 + 1000  # long enough to be looked at in pieces
    text = repeated * (characters // len(repeated))
    tokens = len(whole.tokenize(text))
    assert len(ChatRenderer(bundled_tokenizer, tokens).tokenize(text)) == tokens


@pytest.mark.parametrize("repeated", ["the quick brown fox ", "a ", "\u4e2d"])
def test_the_count_of_a_prompt_that_is_too_long_is_exact_or_not_given(bundled_tokenizer: Any, repeated: str) -> None:
    renderer = ChatRenderer(bundled_tokenizer, CONTEXT)
    for characters in (2 * CONTEXT, 6 * CONTEXT, 9 * CONTEXT, 14 * CONTEXT):
        text = repeated * (characters // len(repeated))
        exact = len(ChatRenderer(bundled_tokenizer).tokenize(text))
        try:
            counted = len(renderer.tokenize(text))
        except ContextLengthExceeded as refusal:
            counted = refusal.prompt_tokens or (exact if exact > CONTEXT else 0)
        assert counted == exact


def test_stop_strings_that_nearly_come_cost_no_more_than_others() -> None:
    stops = [Counted("a" * 25_000), *(Counted("a" * (100 + number) + "b" * 20_000) for number in range(3))]
    finder = StopFinder(stops)
    assert "".join(finder.push("a" * 8) for _ in range(256)) == ""
    assert finder.flush() == "a" * 8 * 256
    assert max(stop.looks for stop in stops) < 6 * 8 * 256  # a few for each character
