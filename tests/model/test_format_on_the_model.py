"""The fields of the chat format: a call through a replica and a real engine with the tiny model."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.contracts.generation import (
    Bill,
    Delta,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    SamplingParams,
    TokenLogprob,
)
from serve_app.contracts.money import Price
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.loading.loader import LoadedModel, load
from serve_app.model.replica import Replica
from tests.model.conftest import no_orphans

pytestmark = pytest.mark.asyncio(loop_scope="session")  # the engine compiles grammars for one loop

MESSAGES = ({"role": "user", "content": "Tell me about the sea."},)
BILL = Bill("acct", "key", "svc-chat", "local", Price(input=1000, cached_input=500, output=3000))


async def ask(
    replica: Replica,
    sampling: SamplingParams,
    messages: tuple[dict[str, Any], ...] = MESSAGES,
    continue_final: bool = False,
) -> list[Any]:
    call = GenerateCall("r", messages, sampling, 10**12, BILL, continue_final)
    return [event async for event in replica.generate(call)]


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


# logit_bias


@pytest.mark.parametrize("token", [49152, 10**9])
async def test_a_bias_for_an_id_outside_the_vocabulary_is_refused_and_named(replica: Replica, token: int) -> None:
    [rejected] = await ask(replica, SamplingParams(4, logit_bias=((5, 1.0), (token, 1.0))))
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "logit_bias")
    assert "vocabulary" in rejected.message


async def test_a_bias_of_100_makes_a_token_certain(replica: Replica, tiny: LoadedModel) -> None:
    [token] = tiny.tokenizer.encode(" sea", add_special_tokens=False)
    events = await ask(replica, SamplingParams(4, seed=1, logit_bias=((token, 100.0),)))
    assert text_of(events) == " sea" * 4
    assert events[-1].reason is FinishReason.LENGTH


async def test_a_bias_of_minus_100_bans_a_token(replica: Replica) -> None:
    [usual] = tokens_of(await ask(replica, SamplingParams(1, temperature=0.0, logprobs=0)))
    banned = SamplingParams(1, temperature=0.0, logprobs=0, logit_bias=((usual.token, -100.0),))
    [token] = tokens_of(await ask(replica, banned))
    assert token.token != usual.token


# logprobs


def tokens_of(events: list[Any]) -> list[TokenLogprob]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def spelled(events: list[Any]) -> str:
    """The text of the tokens; an unfinished character at the end is left out, as in a reply."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(token.raw for token in tokens_of(events)))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_the_probabilities_of_the_top_20_are_those_of_a_plain_forward_pass(
    make_engine: Callable[..., Engine], tiny_path: Path, temperature: float
) -> None:
    """Within 1e-3, in float32, independent of what changes the choice: here a penalty, a bias and the temperature."""
    reference = load(EngineSettings(model=str(tiny_path), kv_cache_memory="64MiB")).model
    engine = make_engine(dtype="float32")
    replica = Replica(engine, no_orphans)
    sampling = SamplingParams(
        24, temperature=temperature, seed=3, frequency_penalty=1.0, logit_bias=((30, 2.0),), logprobs=20
    )
    events = await ask(replica, sampling)
    told = tokens_of(events)
    assert len(told) == events[-1].completion_tokens == 24
    assert reference.dtype == torch.float32
    prompt = engine.chat.render(list(MESSAGES))
    ids = torch.tensor([[*prompt, *(token.token for token in told)]])
    with torch.inference_mode():
        expected = reference(ids).logits[0, len(prompt) - 1 : -1].float().softmax(-1)
    for token, row in zip(told, expected, strict=True):
        assert exp(token.logprob) == pytest.approx(row[token.token].item(), abs=1e-3)
        assert [exp(other.logprob) for other in token.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)
        for other in token.top:
            assert exp(other.logprob) == pytest.approx(row[other.token].item(), abs=1e-3)


async def test_the_bytes_of_the_tokens_are_the_text(replica: Replica) -> None:
    messages = ({"role": "user", "content": "Repeat: 你好 👋🏽 é"},)
    events = await ask(replica, SamplingParams(40, temperature=1.3, seed=5, logprobs=0), messages)
    assert len(tokens_of(events)) == events[-1].completion_tokens
    assert spelled(events) == text_of(events)
    assert all(token.top == () for token in tokens_of(events))


async def test_each_token_of_the_text_is_sent_and_none_of_a_stop_string(replica: Replica) -> None:
    usual = text_of(await ask(replica, SamplingParams(40, temperature=0.0)))
    stops = [usual[start : start + 7] for start in range(8, 80, 18)]
    for stop in (stop for stop in stops if "\ufffd" not in stop):
        events = await ask(replica, SamplingParams(40, temperature=0.0, stop=(stop,), logprobs=0))
        text = text_of(events)
        assert text == usual[: usual.index(stop)]
        assert spelled(events).startswith(text)
        before_last = b"".join(token.raw for token in tokens_of(events)[:-1])
        assert len(before_last) < max(1, len(text.encode()))  # the last one began within the text


async def test_a_reply_that_continues_a_prefix_has_only_its_own_tokens(replica: Replica) -> None:
    begun = (*MESSAGES, {"role": "assistant", "content": "The sea is"})
    events = await ask(replica, SamplingParams(6, temperature=0.0, logprobs=1), begun, continue_final=True)
    assert len(tokens_of(events)) == 6
    assert spelled(events) == text_of(events)
