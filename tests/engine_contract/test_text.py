"""Which text a reply has: stop strings, characters of several tokens, and what decides about the next token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.contracts.generation import FinishReason, Grammar, GrammarKind
from serve_app.engine.port import Promise

from .replies import Asker

pytestmark = pytest.mark.model


async def test_a_stop_string_across_tokens_ends_the_reply_and_none_of_it_is_sent(asker: Asker) -> None:
    plain = await asker.ask(max_tokens=20, ignore_eos=True, logprobs=0)
    texts = [token.raw.decode() for token in plain.tokens]
    stop = texts[7][-2:] + texts[8] + texts[9][:2]
    reply = await asker.ask(max_tokens=20, ignore_eos=True, stop=("\0", stop))
    assert (plain.end.stop, reply.end.stop) == (None, stop)
    assert reply.end.reason is FinishReason.STOP
    assert reply.text == plain.text[: plain.text.index(stop)]
    assert reply.end.completion_tokens <= 10


async def test_no_stop_string_counts_before_the_least_number_of_tokens(asker: Asker) -> None:
    plain = await asker.ask(max_tokens=20, ignore_eos=True, logprobs=0)
    stop = plain.tokens[2].raw.decode()
    reply = await asker.ask(max_tokens=20, stop=(stop,), min_tokens=12)
    assert reply.end.completion_tokens > 12
    assert reply.text.startswith(plain.text[: plain.text.index(stop) + len(stop)])


async def test_a_character_of_several_tokens_is_sent_whole(asker: Asker) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[\U0001f600\U0001f389]{4}")
    reply = await asker.ask(max_tokens=60, grammar=grammar)
    assert set(reply.text) <= {"\U0001f600", "\U0001f389"}
    assert len(reply.text) == 4
    assert all("\ufffd" not in delta.text for delta in reply.deltas)
    assert reply.end.completion_tokens > 4


async def test_an_unfinished_character_at_the_end_is_left_out_and_counted(asker: Asker) -> None:
    grammar = Grammar(GrammarKind.REGEX, "\U0001f600{4}")
    whole = await asker.ask(max_tokens=60, grammar=grammar)
    cut = await asker.ask(max_tokens=whole.end.completion_tokens - 1, grammar=grammar)
    assert whole.text.startswith(cut.text)
    assert len(cut.text) == 3
    assert cut.end.completion_tokens == whole.end.completion_tokens - 1


async def test_a_seed_gives_the_same_reply_again_and_another_seed_another_one(asker: Asker) -> None:
    replies = [await asker.ask(temperature=1.5, seed=seed, ignore_eos=True) for seed in (7, 8, 7)]
    assert replies[0].text == replies[2].text != replies[1].text


@pytest.mark.promise(Promise.SAME_IN_ANY_BATCH)
async def test_a_seed_gives_the_same_reply_also_beside_others(asker: Asker) -> None:
    alone = await asker.ask(temperature=1.5, seed=7, ignore_eos=True)
    crowd = await asyncio.gather(*(asker.ask(temperature=1.5, seed=seed, ignore_eos=True) for seed in (7, 8, 9)))
    assert crowd[0].text == alone.text
    assert len({reply.text for reply in crowd}) == 3


async def test_penalties_keep_a_reply_from_repeating_itself(asker: Asker) -> None:
    async def different(**penalties: float) -> int:
        reply = await asker.ask("Repeat the word river.", max_tokens=40, ignore_eos=True, logprobs=0, **penalties)
        return len({token.token for token in reply.tokens})

    plain = await different()
    assert await different(frequency_penalty=2.0) > plain
    assert await different(presence_penalty=2.0) > plain
    assert await different(repetition_penalty=1.8) > plain


async def test_a_bias_forbids_a_token_or_forces_it(asker: Asker) -> None:
    [first] = (await asker.ask(max_tokens=1, logprobs=0)).tokens
    [other] = (await asker.ask(max_tokens=1, logprobs=0, logit_bias=((first.token, -100.0),))).tokens
    assert other.token != first.token
    forced = await asker.ask(max_tokens=3, ignore_eos=True, logprobs=0, logit_bias=((other.token, 100.0),))
    assert [token.token for token in forced.tokens] == [other.token] * 3


async def test_a_ban_holds_against_the_smallest_repetition_penalty(asker: Asker) -> None:
    options = {"repetition_penalty": 0.01, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    said = {token.token for token in (await asker.ask(**options)).tokens}
    others = (await asker.ask(logit_bias=tuple((token, -100.0) for token in said), **options)).tokens
    assert said.isdisjoint(token.token for token in others)


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": 5e-324, "seed": -(2**63)},
        {"temperature": 2.0, "top_p": 5e-324, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 1 - 2**-53, "min_p": 5e-324, "top_k": 1_000_000},
        {"temperature": 1.0, "repetition_penalty": 10.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 1.0, "repetition_penalty": 0.01, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 1.0, "logit_bias": tuple((token, -100.0) for token in range(1024)), "seed": 2**63 - 1},
        {"temperature": 1.0, "logit_bias": ((0, 5e-324), (1, 100.0)), "min_tokens": 4},
    ],
    ids=str,
)
async def test_numbers_at_the_limits_of_their_ranges_give_a_reply(asker: Asker, numbers: dict[str, Any]) -> None:
    reply = await asker.ask(max_tokens=4, ignore_eos=True, logprobs=0, **numbers)
    assert reply.end.reason is FinishReason.LENGTH
    assert reply.end.completion_tokens == 4


async def test_a_bias_outside_the_vocabulary_is_refused(asker: Asker) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        await asker.ask(logit_bias=((10**7, 1.0),))


async def test_log_probabilities_are_of_the_model_before_any_parameter(asker: Asker) -> None:
    plain = await asker.ask(max_tokens=6, ignore_eos=True, logprobs=5)
    warm = await asker.ask(max_tokens=1, temperature=2.0, seed=1, logprobs=5, logit_bias=((11, 3.0),))
    for token in plain.tokens:
        values = [other.logprob for other in token.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert token.logprob == values[0] <= 0
    assert [other.token for other in warm.tokens[0].top] == [other.token for other in plain.tokens[0].top]
    assert [other.logprob for other in warm.tokens[0].top] == pytest.approx(
        [other.logprob for other in plain.tokens[0].top], abs=1e-3
    )
