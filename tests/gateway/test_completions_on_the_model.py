"""What evaluation harnesses compute from completions of the tiny model equals transformers' own scores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import torch

from serve_app.contracts.books import Settlement
from serve_app.contracts.generation import BackendEvent, GenerateCall
from serve_app.engine.engine import Engine
from serve_app.model.replica import Replica
from tests.gateway.connections import Call
from tests.gateway.world import World, taking, until

pytestmark = pytest.mark.model

CASES = [("The river runs past", " the mill."), ("Grüße aus", " 東京!"), ("One two three", " four five six seven")]


async def no_orphans(settlements: list[Settlement]) -> Any:
    raise AssertionError(settlements)


@pytest.fixture
def behind(world: World, make_engine: Callable[..., Engine]) -> World:
    replica = Replica(make_engine(prefill_chunk=32), no_orphans)

    async def generate(backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        async with contextlib.aclosing(replica.generate(call)) as events:
            async for event in events:
                yield event

    world.backends.generate = taking(generate)  # type: ignore[method-assign]
    return world


def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the greedy one, by transformers' own logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0].float().log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def scored(choice: Any, context: int, end: int | None) -> tuple[float, bool]:
    """The same from a reply: without the tokens of the context, and those from `end` on."""
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"][context:end], logprobs["top_logprobs"][context:end]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
async def test_log_likelihoods_are_those_of_transformers(
    behind: World, tiny_reference: Any, bundled_tokenizer: Any, max_tokens: int, as_ids: bool
) -> None:
    pairs = [[bundled_tokenizer(text)["input_ids"] for text in case] for case in CASES]
    with torch.inference_mode():
        context = pairs[0][0]
        greedy = tiny_reference(torch.tensor([context])).logits[0, -1].argmax().item()
    pairs.append([context, [greedy]])
    prompts: list[Any] = [first + second for first, second in pairs]
    if not as_ids:
        prompts = [bundled_tokenizer.decode(ids) for ids in prompts]
        pairs, prompts = pairs[:3], prompts[:3]  # the greedy token's text may be encoded otherwise
    fields = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    call = await Call(behind, path="/completions", prompt=prompts, **fields).done()
    assert call.status == 200, call.json
    choices = sorted(call.json["choices"], key=lambda choice: choice["index"])
    for (first, second), choice in zip(pairs, choices, strict=True):
        found = scored(choice, len(first), -1 if max_tokens else None)  # without the generated token
        likelihood, is_greedy = expected(tiny_reference, first, second)
        assert found == (pytest.approx(likelihood, abs=1e-2), is_greedy)
    if as_ids:
        assert scored(choices[-1], len(context), -1 if max_tokens else None)[1]
    await until(lambda: behind.is_idle)
    assert call.json["usage"]["completion_tokens"] == max_tokens * len(prompts)


async def test_a_reply_that_ends_at_once_has_one_entry_after_the_prompt(behind: World, bundled_tokenizer: Any) -> None:
    """Harnesses ask for one token and drop the last entry: without the end's, it would be one of the prompt."""
    prompt = bundled_tokenizer("The river")["input_ids"]
    end = bundled_tokenizer.eos_token_id
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(end): 100}}
    call = await Call(behind, path="/completions", prompt=prompt, **fields).done()
    [choice] = call.json["choices"]
    assert choice["text"] == "The river"
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
    assert call.json["usage"]["completion_tokens"] == 0


async def test_an_echo_joins_the_text_and_its_offsets(behind: World) -> None:
    call = await Call(
        behind, path="/completions", prompt="Grüße aus 東京", echo=True, logprobs=0, max_tokens=8, temperature=0
    ).done()
    [choice] = call.json["choices"]
    assert choice["text"].startswith("Grüße aus 東京")
    logprobs, text = choice["logprobs"], choice["text"]
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith(("bytes:", "<|")):
            assert text.startswith(name, offset)
