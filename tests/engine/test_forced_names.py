"""Names of special tokens that a grammar forces are text: ordinary tokens spell them, and no reply ends within one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import normalizers

from serve_app.contracts.generation import FinishReason, Grammar, GrammarKind
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.vllm_adapter.request_params import grammar_text
from tests.engine.fakes import EOS, FakeRunner, Inbox, byte_tokenizer, fake_engine, request, submit
from tests.engine.test_detokenizer import sentencepiece_tokenizer
from tests.engine.test_grammar import allowed

NAMES = ("<eos>", "</s>", "<filename>", "[MARK]", "<tool>")
TEXT = "a <filename>b<eos>[MARK]</s> <tool>e\u0301 ▁ <0x41>"


def with_names(tokenizer: Any) -> Any:
    """The tokenizer with more special tokens, an added token like Qwen's <tool_call>, and normalization."""
    made = deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<filename>", "[MARK]"]})
    made.add_tokens(["<tool>"])
    if made.backend_tokenizer.normalizer is None:
        made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


@pytest.fixture(scope="module", params=[byte_tokenizer, sentencepiece_tokenizer], ids=["bytes", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return with_names(request.param())


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    yield compiler
    compiler.close()


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


GRAMMARS = {
    "choices": Grammar(GrammarKind.REGEX, "|".join(map(re.escape, [f"x{TEXT}", f"y{TEXT}"]))),
    "regex": Grammar(GrammarKind.REGEX, f"[xy]{re.escape(TEXT)}(<filenam[e]>){{2}}"),
    "const": schema({"const": TEXT}),
    "enum": schema({"enum": [f"x{TEXT}", f"y{TEXT}"]}),
    "pattern": schema({"type": "string", "pattern": f"^{re.escape(TEXT)}$"}),
    "key": schema(an_object(**{TEXT: {"type": "null"}})),
    "argument": Grammar.tool_calls([("call ", json.dumps(an_object(path={"enum": [TEXT]})), "!")]),
}


def special_ids(tokenizer: Any) -> list[int]:
    return [i for i, token in tokenizer.added_tokens_decoder.items() if str(token) in NAMES]


def most_dangerous(state: GrammarState, special: list[int], eos: int) -> int:
    """The first allowed special token, the end last."""
    (row,) = state.masks()
    choices = allowed(row)
    return next(
        (t for t in special if t in choices and t != eos), min(choices, key=lambda token: (token == eos, token))
    )


@pytest.mark.parametrize("name", GRAMMARS)
def test_ordinary_tokens_spell_the_names_of_special_tokens_that_a_grammar_forces(
    compiler: GrammarCompiler, tokenizer: Any, name: str
) -> None:
    state, special, eos = compiler.start_grammar(GRAMMARS[name]), special_ids(tokenizer), tokenizer.eos_token_id
    tokens: list[int] = []
    while not state.finished and len(tokens) < 300:
        assert not set(state.forced()) & set(special)
        tokens.append(most_dangerous(state, special, eos))
        assert tokens[-1] not in special
        state.accept(tokens[-1])
        assert state.error is None
    assert state.finished
    vocabulary = Vocabulary(tokenizer)
    text = b"".join(vocabulary.spelling(token) for token in tokens).decode()
    assert TEXT in (text.encode().decode("unicode_escape") if "\\u" in text else text)


@pytest.mark.parametrize("name", GRAMMARS)
def test_vllm_forces_no_special_token(compiler: GrammarCompiler, tokenizer: Any, name: str) -> None:
    """As vLLM does, with llguidance's own reading of the tokenizer."""
    tables = from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    matcher = LLMatcher(tables, grammar_text(compiler.compile(GRAMMARS[name]).lark), log_level=0)
    rng, tokens = np.random.default_rng(1), 0
    while not matcher.is_stopped() and tokens < 300:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        choices = set(bits.nonzero()[0].tolist()) - {tokenizer.eos_token_id}
        assert choices.isdisjoint(special_ids(tokenizer))
        if not choices:
            break
        assert matcher.consume_token(int(rng.choice(sorted(choices))))
        tokens += 1
    assert matcher.is_accepting()


def test_the_name_of_an_end_token_does_not_end_a_reply() -> None:
    running = fake_engine(FakeRunner(b'"a<eos>b"'))
    inbox = Inbox()
    submit(running, request(grammar=schema({"const": "a<eos>b"})), inbox)
    assert (inbox.wait().reason, inbox.text) == (FinishReason.STOP, '"a<eos>b"')
    running.close()


def test_an_end_token_within_a_grammar_does_not_end_a_reply() -> None:
    runner = FakeRunner()
    runner.script = [*b"a", EOS, *b"b1"]  # type: ignore[assignment]
    running = fake_engine(runner)
    inbox = Inbox()
    submit(running, request(grammar=Grammar.tool_calls([("a<eos>b", '{"const": 1}', "")])), inbox)
    end = inbox.wait()
    assert (end.reason, inbox.text) == (FinishReason.STOP, "ab1")
    running.close()
