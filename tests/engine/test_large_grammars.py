"""Schemas that ask for more than the grammar engine can build: refused with 422, or held to the end of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits

from serve_app.api.errors import ApiError
from serve_app.api.json_schemas import MAX_MINIMUM, MAX_REPEATED, check_schema, repeated_size
from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from tests.engine.counted import Counted

TOKENS = 40
Renew = Callable[[list[int]], Future[LLMatcher]]


def string(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def expanding(levels: int, part: Any, last: Any) -> dict[str, Any]:
    defs = {f"a{level}": part({"$ref": f"#/$defs/a{level + 1}"}) for level in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": last}}


NASTY: dict[str, Any] = {
    "100,000 times": string("^a{100000}$"),
    "30,000 times": string("^a{30000}$"),
    "1,000,000,000 times": string("^a{1000000000}$"),
    "10,000 times": string("^a{9998}$"),
    "any of 5,000 letters": string(r"^\w{1,5000}$"),
    "repeated repetitions": string("^(a{100}){99}$"),
    "ambiguous repetitions": string("^(a{1,99}){1,100}$"),
    "thrice repeated": string("^((a{0,30}){0,30}){0,30}$"),
    "a place far from the end": string("a.{500}$"),
    "two places far from the end": string("[a-z].{15}[0-9]$"),
    "numbers that meet late": {"allOf": [string(f"^(a{{{p}}})*$") for p in (2, 3, 5, 7, 11, 13, 17)]},
    "a class and its end": string("^[]a]{20000}$"),
    "a name": {"type": "object", "patternProperties": {"^a{100000}$": {}}, "additionalProperties": False},
    "minLength": {"type": "string", "minLength": 10**9},
    "minLength beyond the engine": {"type": "string", "minLength": 10**12},
    "maxLength": {"type": "string", "maxLength": 10**12},
    "lengths far apart": {"type": "string", "minLength": 50_000, "maxLength": 60_000},
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "maxItems": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**12},
    "arrays of arrays": {"type": "array", "minItems": 300, "items": {"type": "array", "minItems": 300}},
    "minProperties": {"type": "object", "minProperties": 10**9, "additionalProperties": False},
    "100,000 values": {"enum": list(range(100_000))},
    "8,000 values": {"enum": [f"v{number}" for number in range(8000)]},
    "a long constant": {"const": "x" * 9_999},
    "a constant object": {"const": {str(number): number for number in range(3000)}},
    "a long chain of references": expanding(1000, lambda ref: ref, {"type": "integer"}),
    "references that double": expanding(30, lambda ref: {"prefixItems": [ref, ref], "minItems": 2}, {"type": "null"}),
    "alternatives that double": expanding(20, lambda ref: {"anyOf": [ref, ref]}, {"type": "integer"}),
    "alternatives that multiply": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": {}}, "required": [f"p{i}{j}"]} for j in range(5)]} for i in range(8)
        ]
    },
    "bounds far apart": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
}


def schema(keywords: Any, strict: bool = True) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(keywords), strict)


def until_ready(state: GrammarState) -> GrammarState:
    """Waits while the grammar is compiled again, as an engine does between its steps."""
    while not state.ready:
        assert state._renewal is not None
        state._renewal.result(60)
    return state


def reply(state: GrammarState, tokenizer: Any, tokens: int, seed: int = 1) -> str:
    """A random reply of at most so many tokens, long ones preferred, as an engine asks for it."""
    eos, rng, said = tokenizer.eos_token_id, np.random.default_rng(seed), []
    while len(said) < tokens and not state.finished and state.error is None:
        state.prepare(state.forced()[:4])
        row = until_ready(state).masks()[0].numpy().view(np.uint8)
        if not until_ready(state).error and not row.any():
            continue
        ids = np.unpackbits(row, bitorder="little").nonzero()[0]
        choices = ids[ids != eos]
        if not len(choices):
            break
        drawn = rng.choice(choices, 20)
        said.append(int(max(drawn, key=lambda token: len(tokenizer.convert_ids_to_tokens(int(token))))))
        state.accept(said[-1])
    return str(tokenizer.decode(said))


@pytest.mark.parametrize("name", NASTY)
def test_a_schema_is_refused_before_the_first_token_or_held_to(
    bundled_compiler: GrammarCompiler, bundled_tokenizer: Any, name: str
) -> None:
    try:
        check_schema("schema", NASTY[name])
        state = bundled_compiler.start_grammar(schema(NASTY[name]))
    except (ApiError, UnsupportedGrammar):
        return
    text = reply(state, bundled_tokenizer, TOKENS)
    assert state.error is None or state.too_large, state.error
    if state.finished:
        Draft202012Validator(NASTY[name]).validate(json.loads(text))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        (string("^a{100000}$"), f"a pattern of more than {MAX_REPEATED} characters"),
        (string("^(a{101}){100}$"), "^(a{101}){100}$"),
        ({"items": {"minLength": 10**12}}, f"a minLength of 1e+12, and at most {MAX_MINIMUM}"),
        ({"minItems": MAX_MINIMUM + 1}, "a minItems of 1e+09"),
    ],
)
def test_what_is_too_large_is_named(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_schema("response_format.json_schema.schema", keywords)
    assert (caught.value.status, caught.value.param) == (422, "response_format.json_schema.schema")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3), ("a{3}", 3), ("(?:ab){2,}", 4), ("((a){2}b){3}", 9), ("[a-z]{5}", 5), ("[]a]{3}", 3),
        (r"\{9\}", 3), ("[{3}]", 1), (r"[\]]{4}", 4), ("]{4}", 4), ("[[:alpha:]]{7}", 7), (r"\\{5}", 5),
        ("(a|b){10}x{0,2}", 32), ("a{200}{200}", MAX_REPEATED + 1), ("(" * 9000 + "a{10001}", MAX_REPEATED + 1),
    ],
)  # fmt: skip
def test_repetitions_count_as_if_they_were_written_out(pattern: str, size: int) -> None:
    assert repeated_size(pattern) == size


@pytest.mark.parametrize("piece", ["[", "(", "[\\", "(?", "{1,", "(?<a", "[]", "a{2}"])
def test_repetitions_are_counted_in_steps_in_proportion_to_the_pattern(piece: str) -> None:
    pattern = Counted(piece * (5000 // len(piece)))
    repeated_size(pattern)
    assert pattern.looks < 6 * 5000


@pytest.fixture
def small_lexer(bundled_compiler: GrammarCompiler, bundled_tokenizer: Any) -> Iterator[GrammarCompiler]:
    """A compiler whose lexers end at 4,000 states."""
    compiler = GrammarCompiler(bundled_tokenizer, len(bundled_tokenizer), frozenset({bundled_tokenizer.eos_token_id}))
    compiler._tables = bundled_compiler._tokenizer()
    compiler._limits = LLParserLimits(initial_lexer_fuel=1_000_000, max_lexer_states=4000)
    yield compiler
    compiler.close()


def test_replies_of_one_grammar_do_not_use_up_its_lexer(small_lexer: GrammarCompiler, bundled_tokenizer: Any) -> None:
    """Each position of such a text is a state of the lexer, and copies of a compiled grammar share the lexer."""
    grammar = schema({"type": "string", "minLength": 50_000, "maxLength": 60_000})
    beside = small_lexer.start_grammar(grammar)
    renewed = 0
    for seed in range(3):
        state = small_lexer.start_grammar(grammar)
        renew = state._renew

        def counted(tokens: list[int], renew: Renew = renew) -> Future[LLMatcher]:
            nonlocal renewed
            renewed += 1
            return renew(tokens)

        state._renew = counted
        reply(state, bundled_tokenizer, 150, seed)
        assert state.error is None
    assert renewed
    assert beside.masks().any()
    reply(beside, bundled_tokenizer, 10)
    assert beside.error is None


def test_a_reply_whose_next_token_costs_too_much_says_so_and_leaves_others_alone(
    bundled_compiler: GrammarCompiler, bundled_tokenizer: Any
) -> None:
    grammar = schema(NASTY["ambiguous repetitions"])
    beside = bundled_compiler.start_grammar(grammar)
    state = bundled_compiler.start_grammar(grammar)
    for token in bundled_tokenizer.encode('"' + "a" * 200):
        until_ready(state).accept(token)
        until_ready(state).masks()
        until_ready(state).masks()  # with a new matcher
    assert until_ready(state).too_large
    assert "too large" in str(state.error)
    assert beside.masks().any()
    assert beside.error is None


def test_forced_tokens_are_computed_once_for_all_of_them(bundled_compiler: GrammarCompiler) -> None:
    state = bundled_compiler.start_grammar(schema({"const": "abcdefgh " * 1000}))
    forced = state.forced()
    assert len(forced) > 1000
    computed = 0
    matcher = state._matcher

    class Counting:
        def __getattr__(self, name: str) -> Any:
            nonlocal computed
            computed += name == "compute_ff_tokens"
            return getattr(matcher, name)

    state._matcher = Counting()  # type: ignore[assignment]
    for number, token in enumerate(forced[:500]):
        assert state.forced() == forced[number:]
        state.accept(token)
    assert computed == 0
    assert state.error is None
