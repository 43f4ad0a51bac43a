"""Tokens are counted exactly, and prompts that were seen before are found by their own account alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from serve_app.contracts.generation import FinishReason
from serve_app.engine.errors import ContextLengthExceeded

from .replies import Asker

pytestmark = pytest.mark.model
END = 2  # the bundled model's "<|im_end|>"
BOOK = "The river runs past the mill, the bridge and the old harbour. " * 20


async def test_a_reply_that_is_cut_has_as_many_tokens_as_were_asked_for(asker: Asker) -> None:
    request = asker.request(max_tokens=17, ignore_eos=True, logprobs=0)
    reply = await asker.run(request)
    assert reply.started is not None
    assert reply.started.prompt_tokens == reply.end.prompt_tokens == len(request.prompt_token_ids)
    assert (reply.end.reason, reply.end.completion_tokens) == (FinishReason.LENGTH, 17)
    assert len(reply.tokens) == 17
    assert b"".join(token.raw for token in reply.tokens).decode() == reply.text


async def test_the_end_of_sequence_token_is_neither_in_the_text_nor_in_the_count(asker: Asker) -> None:
    reply = await asker.ask(max_tokens=100, min_tokens=7, logit_bias=((END, 100.0),), logprobs=0)
    assert reply.end.reason is FinishReason.STOP
    assert reply.end.completion_tokens == len(reply.tokens) == 7
    assert b"".join(token.raw for token in reply.tokens).decode() == reply.text
    assert "<|im_end|>" not in reply.text


async def test_each_delta_counts_the_tokens_so_far(asker: Asker) -> None:
    reply = await asker.ask(max_tokens=30, ignore_eos=True)
    counts = [delta.completion_tokens for delta in reply.deltas]
    assert counts[0] >= 1
    assert all(earlier <= later for earlier, later in pairwise(counts))
    assert counts[-1] <= reply.end.completion_tokens == 30


async def test_a_prompt_is_found_again_by_its_own_account_and_by_no_other(asker: Asker) -> None:
    first = await asker.ask(BOOK, tenant="reader")
    again = await asker.ask(BOOK, tenant="reader")
    other = await asker.ask(BOOK, tenant="stranger")
    assert (first.end.cached_tokens, other.end.cached_tokens) == (0, 0)
    assert again.end.prompt_tokens // 2 < again.end.cached_tokens < again.end.prompt_tokens
    assert first.text == again.text == other.text


async def test_a_prompt_may_fill_the_context_but_for_one_token(asker: Asker) -> None:
    most = asker.engine.max_context
    reply = await asker.ask((5,) * (most - 1), max_tokens=50, ignore_eos=True)
    assert (reply.end.reason, reply.end.completion_tokens) == (FinishReason.LENGTH, 1)
    with pytest.raises(ContextLengthExceeded):
        await asker.ask((5,) * most)


async def test_the_tokens_up_to_a_mark_are_counted(asker: Asker) -> None:
    plain = await asker.ask(logprobs=0, ignore_eos=True)
    texts = [token.raw.decode(errors="replace") for token in plain.tokens]
    mark = texts[9] + texts[10]
    first = next(n for n in range(1, len(texts) + 1) if mark in "".join(texts[:n]))
    marked = await asker.ask(mark=mark, ignore_eos=True)
    assert marked.end.marked_tokens == first
    assert (await asker.ask(mark="never written", ignore_eos=True)).end.marked_tokens is None
