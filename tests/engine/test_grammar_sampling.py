"""Grammars with the sampler: it draws only allowed tokens, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.contracts.generation import Grammar, GrammarKind, SamplingParams
from serve_app.engine.grammar.compiler import GrammarCompiler, GrammarState
from serve_app.engine.sampling.draw import DEAD_END
from serve_app.engine.sampling.sampler import SamplerState, sample
from tests.engine.fakes import EOS, byte_tokenizer
from tests.engine.test_grammar import PADDED, PatternCompiler, regex, said, schema


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = PatternCompiler(byte_tokenizer(), PADDED, frozenset({EOS}))
    yield compiler
    compiler.close()


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0]),
    grammar=st.sampled_from([Grammar(GrammarKind.JSON_OBJECT), regex("(ab?c|[x-z]+,)*"), schema(enum=["aaa", "aab"])]),
    data=st.data(),
)
def test_a_reply_is_the_same_with_drafts_that_are_right_wrong_or_past_the_end(
    compiler: GrammarCompiler, seed: int, temperature: float, grammar: Grammar, data: st.DataObject
) -> None:
    table = torch.randn(40, PADDED, generator=torch.Generator().manual_seed(seed)) * 3

    def reply(with_drafts: tuple[int, ...] | None) -> tuple[int, ...]:
        state = sampling(compiler.start_grammar(grammar), temperature=temperature, seed=seed)
        output: list[int] = []
        while len(output) < 20 and not state.complete and EOS not in output:
            draft: tuple[int, ...] = ()
            if with_drafts is not None:
                assert state.grammar is not None
                kind = data.draw(st.sampled_from(["right", "wrong", "forced"]))
                right = with_drafts[len(output) :][:4]
                draft = {"right": (*right, EOS, 7), "wrong": (*right[:1], 250, *right[2:])}.get(
                    kind, state.grammar.forced()[:4]
                )
                state.grammar.prepare(draft)
            rows = table[(torch.arange(1 + len(draft)) + len(output)) % len(table)]
            (entry,) = sample(rows, [state], [draft])
            for sampled in entry:
                output.append(sampled.token)
                if sampled.token == EOS:
                    break
                state.advance(sampled.token)
                if state.complete:
                    break
        return tuple(output[:20])

    alone = reply(None)
    assert all(token >= 0 for token in alone)
    assert reply(alone) == alone


def sampling(state: GrammarState | None, **options: object) -> SamplerState:
    params = SamplingParams(**{"max_tokens": 10, "seed": 1, **options})  # type: ignore[arg-type]
    return SamplerState(params, (), frozenset({EOS}), PADDED, state)


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.1}], ids=str
)
def test_only_allowed_tokens_are_sampled_and_only_where_there_is_a_grammar(
    compiler: GrammarCompiler, options: dict[str, float]
) -> None:
    given = random_logits(3)
    given[:, 7] = 90.0
    for seed in range(20):
        states = [
            sampling(None, temperature=0.0),
            sampling(compiler.start_grammar(regex("[a-e]+")), **options, seed=seed),
        ]
        entries = sample(given.clone(), states, [(), (ord("a"),)])
        assert entries[0][0].token == 7
        assert entries[1][0].token in set(b"abcde")
        assert entries[1][-1].token in {*b"abcde", EOS}


def test_min_tokens_below_a_complete_grammar_gives_the_end_and_no_nonsense(compiler: GrammarCompiler) -> None:
    for temperature in (0.0, 1.0):
        state = sampling(said(compiler.start_grammar(regex("a")), b"a"), temperature=temperature, min_tokens=9)
        assert state.complete
        assert sample(random_logits(1), [state], [()])[0][0].token == EOS


def test_min_tokens_goes_on_while_the_grammar_can(compiler: GrammarCompiler) -> None:
    given = random_logits(1)
    given[0, EOS] = 50.0
    state = sampling(said(compiler.start_grammar(regex("a+")), b"a"), temperature=0.0, min_tokens=9)
    assert sample(given.clone(), [state], [()])[0][0].token == ord("a")


def test_a_grammar_is_stronger_than_bans_and_chooses_among_banned_tokens_by_their_logits(
    compiler: GrammarCompiler,
) -> None:
    given = random_logits(1)
    given[0, ord("a")], given[0, ord("b")] = -5.0, 5.0
    state = sampling(compiler.start_grammar(regex("a|b")), temperature=0.0, logit_bias=((97, -100.0), (98, -100.0)))
    assert sample(given.clone(), [state], [()])[0][0].token == ord("b")
    state = sampling(compiler.start_grammar(regex("a|b")), temperature=2.0, logit_bias=((98, -100.0),))
    assert sample(given.clone(), [state], [()])[0][0].token == ord("a")


def test_a_failed_grammar_ends_its_own_row_and_no_other(compiler: GrammarCompiler) -> None:
    broken = sampling(said(compiler.start_grammar(regex("ab")), b"x"))
    whole = sampling(compiler.start_grammar(regex("ab")))
    entries = sample(random_logits(3), [broken, whole], [(), (ord("a"),)])
    assert [s.token for s in entries[0]] == [DEAD_END]
    assert [s.token for s in entries[1]] == [ord("a"), ord("b")]


class FailingMatcher:
    """Rust's panics reach Python as BaseExceptions."""

    def __getattr__(self, name: str) -> object:
        return lambda *args: False

    def unsafe_compute_mask_ptr(self, *args: object) -> None:
        raise BaseException("panicked")


def test_a_panic_of_the_grammar_engine_is_that_requests_error_alone(compiler: GrammarCompiler) -> None:
    state = compiler.start_grammar(regex("ab"))
    state._matcher = FailingMatcher()
    state.prepare()
    assert not state.masks().any()
    assert state.error is not None
    assert "panicked" in state.error


def test_logprobs_under_a_grammar_are_those_of_the_raw_logits(compiler: GrammarCompiler) -> None:
    given = random_logits(1)
    (entry,) = sample(given.clone(), [sampling(compiler.start_grammar(regex("a")), logprobs=3)], [()])
    expected = given.log_softmax(-1)[0]
    assert entry[0].logprob == pytest.approx(float(expected[ord("a")]), abs=1e-5)
    assert [token for token, _ in entry[0].top] == expected.topk(3).indices.tolist()
