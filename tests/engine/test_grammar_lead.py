"""Grammars that begin after a text, for example after the end of reasoning: before it they constrain nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.contracts.generation import Grammar, GrammarKind
from serve_app.engine.errors import UnsupportedGrammar
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, next_tokens

CALL, END = 257, 258
NAMES = {"<|call|>": CALL, "</think>": END}


@pytest.fixture(scope="module")
def plain() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def marked() -> Iterator[GrammarCompiler]:
    """The same with special tokens for calls and the end of reasoning."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES)})
    compiler = GrammarCompiler(tokenizer, PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


def takes(state: GrammarState, tokens: list[int], end: bool = True) -> bool:
    """Returns whether each token is allowed in its turn and, with `end`, the end after the last one."""
    for token in tokens:
        if token not in next_tokens(state):
            return False
        state.accept(token)
    assert state.error is None
    return not end or EOS in next_tokens(state)


def spelled(text: str) -> list[int]:
    """Tokens of a text in which names of special tokens stand for these."""
    tokens: list[int] = []
    while text:
        name = next((n for n in NAMES if text.startswith(n)), None)
        tokens += [NAMES[name]] if name else text[0].encode()
        text = text[len(name or text[0]) :]
    return tokens


KINDS = [
    (Grammar(GrammarKind.JSON_OBJECT), '{"a": [1]}', "[1]"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["x", 1]}'), '"x"', '"y"'),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', strict=False), "[1,1]", "{}"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^[ab]+c$"}'), '"abc"', '"c"'),
    (Grammar.tool_calls([("call(", '{"type": "object"}', ")")]), 'call({"a": 1})', "call(1)"),
]
EACH = pytest.mark.parametrize(
    ("grammar", "good", "wrong"), KINDS, ids=[f"{g.kind}{n}" for n, (g, *_) in enumerate(KINDS)]
)


@EACH
@pytest.mark.parametrize("kind", ["text", "special token"])
def test_a_reply_is_free_up_to_the_lead_and_constrained_from_there(
    plain: GrammarCompiler, marked: GrammarCompiler, kind: str, grammar: Grammar, good: str, wrong: str
) -> None:
    compiler = plain if kind == "text" else marked
    lead = "</think>"

    def tokens(text: str) -> list[int]:
        return list(text.encode()) if kind == "text" else spelled(text)

    held = dataclasses.replace(grammar, lead=lead)
    for before in ("", "I think, </ so\n\n\nwell. {}", good, wrong, "汉 <|think|>"):
        for space in ("", "\n", "\n\n", " \n \n"):
            assert takes(compiler.start_grammar(held), tokens(f"{before}{lead}{space}{good}"))
        assert not takes(compiler.start_grammar(held), tokens(f"{before}{lead}\n{wrong}"))
        assert not takes(compiler.start_grammar(held), tokens(f"{before}{lead}\n\n\n{good}"))
        assert not takes(compiler.start_grammar(held), tokens(before))
        state = compiler.start_grammar(held)
        assert takes(state, tokens(before), end=False)
        assert EOS not in next_tokens(state)
        assert takes(state, tokens(f"{lead}{good}"))


def test_a_special_token_that_is_spelled_out_is_no_lead_and_may_not_be(marked: GrammarCompiler) -> None:
    state = marked.start_grammar(Grammar(GrammarKind.JSON_OBJECT, lead="</think>"))
    assert takes(state, list(b"</think"), end=False)
    assert ord(">") not in next_tokens(state)
    assert END in next_tokens(state)


def test_no_other_special_token_is_allowed_before_the_lead(plain: GrammarCompiler, marked: GrammarCompiler) -> None:
    # It leaves no text: a reader would find a lead that the grammar has not seen.
    for compiler, lead in ((plain, "</think>"), (marked, "</think>"), (marked, "END")):
        assert not {EOS, CALL} & next_tokens(compiler.start_grammar(Grammar(GrammarKind.JSON_OBJECT, lead=lead)))


def test_a_lead_with_a_special_token_inside_is_refused(marked: GrammarCompiler) -> None:
    with pytest.raises(UnsupportedGrammar, match="a special token or contain none"):
        marked.compile(Grammar(GrammarKind.JSON_OBJECT, lead="</think>\n"))


@settings(max_examples=100, deadline=None)
@given(
    lead=st.text('</ab"\\\n é', min_size=1, max_size=5),
    before=st.text('</ab"\\\n é{}', max_size=12),
)
def test_the_first_occurrence_of_any_lead_counts(plain: GrammarCompiler, lead: str, before: str) -> None:
    state = plain.start_grammar(Grammar(GrammarKind.JSON_SCHEMA, '{"const": "X"}', lead=lead))
    first = (before + lead).index(lead) + len(lead)
    assert takes(state, list((before + lead)[:first].encode()), end=False)
    assert ord('"') in next_tokens(state)
    assert not next_tokens(state) - set(b'" \t\n')
