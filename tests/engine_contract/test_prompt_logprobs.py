"""The log-probabilities of a prompt's tokens are those that the engine would give them in a reply."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contracts.generation import FinishReason, TokenLogprob

from .replies import Asker

pytestmark = pytest.mark.model
END = 2  # the bundled model's "<|im_end|>"
BOOK = "The river runs past the mill, the bridge and the old harbour. " * 18  # several blocks


def ids_of(tokens: list[TokenLogprob]) -> tuple[int, ...]:
    return tuple(token.token for token in tokens)


async def test_a_prompt_is_scored_as_its_tokens_were_when_they_were_a_reply(asker: Asker) -> None:
    request = asker.request(max_tokens=20, ignore_eos=True, logprobs=3)
    reply = await asker.run(request)
    prompt = request.prompt_token_ids + ids_of(reply.tokens)
    scored = (await asker.ask(prompt, max_tokens=1, prompt_logprobs=3)).scored
    assert ids_of(scored) == prompt
    again = scored[len(request.prompt_token_ids) :]
    for known, found in zip(reply.tokens, again, strict=True):
        assert (found.text, found.raw) == (known.text, known.raw)
        assert found.logprob == pytest.approx(known.logprob, abs=1e-3)
        assert [one.logprob for one in found.top] == pytest.approx([one.logprob for one in known.top], abs=1e-3)
        assert found.logprob == found.top[0].logprob  # greedy: the very same number
    assert all(token.logprob <= 0 and len(token.top) == 3 for token in scored[1:])
    assert not scored[0].top


async def test_no_tokens_of_output_leave_the_prompt_alone(asker: Asker) -> None:
    request = asker.request(BOOK, max_tokens=0, prompt_logprobs=0)
    reply = await asker.run(request)
    assert ids_of(reply.scored) == request.prompt_token_ids
    assert not reply.deltas
    assert (reply.end.reason, reply.end.completion_tokens) == (FinishReason.LENGTH, 0)
    assert reply.end.prompt_tokens == len(request.prompt_token_ids)


async def test_one_token_has_no_probability(asker: Asker) -> None:
    reply = await asker.ask((5,), max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    assert ids_of(reply.scored) == (5,)
    assert reply.end.completion_tokens == 1


async def test_a_cached_prompt_is_scored_whole_and_a_scored_one_is_found_in_the_cache(asker: Asker) -> None:
    plain = await asker.ask(BOOK, tenant="scorer", max_tokens=4)
    scored = await asker.ask(BOOK, tenant="scorer", max_tokens=4, prompt_logprobs=1)
    again = await asker.ask(BOOK, tenant="scorer", max_tokens=4)
    assert len(scored.scored) == scored.end.prompt_tokens == plain.end.prompt_tokens
    assert scored.end.cached_tokens == 0
    assert again.end.cached_tokens > 0
    assert plain.text == scored.text == again.text
    fresh = await asker.ask(BOOK, max_tokens=0, prompt_logprobs=1)
    assert [one.logprob for one in scored.scored] == pytest.approx([one.logprob for one in fresh.scored], abs=1e-3)


async def test_prompts_are_scored_beside_other_requests_as_alone(asker: Asker) -> None:
    prompts = [BOOK, "Tell me about rivers.", BOOK[:300]]
    alone = [(await asker.ask(prompt, max_tokens=0, prompt_logprobs=2)).scored for prompt in prompts]
    others = [asker.ask(f"Count from {number}.", max_tokens=40, ignore_eos=True) for number in range(2)]
    requests = [asker.ask(prompt, max_tokens=0, prompt_logprobs=2) for prompt in prompts]
    together = (await asyncio.gather(*others, *requests))[len(others) :]
    for expected, reply in zip(alone, together, strict=True):
        assert [one.logprob for one in reply.scored] == pytest.approx([one.logprob for one in expected], abs=2e-3)


async def test_the_token_that_ends_a_reply_is_reported_on_request_and_not_counted(asker: Asker) -> None:
    reply = await asker.ask(max_tokens=9, logit_bias=((END, 100.0),), logprobs=1, end_logprob=True)
    assert reply.end.reason is FinishReason.STOP
    assert (reply.end.completion_tokens, reply.text) == (0, "")
    assert ids_of(reply.tokens) == (END,)
    assert reply.tokens[0].raw == b""
    assert reply.tokens[0].logprob < 0
