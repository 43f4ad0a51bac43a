"""Random requests with fields at their extremes, from HTTP to the ledger: none fails, and no text is free.

The model is noise behind a real engine and replica, so replies take every form that sampling and grammars allow.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from serve_app.engine.scheduling.sequence import Chunk
from tests.gateway.connections import Call
from tests.gateway.scripted_model import EOS, QWEN, ScriptedModel, ScriptedRunner
from tests.gateway.world import PRICE_OUT, World, price, until

HUGE = 10**400
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "look"}}
VALUES: dict[str, list[Any]] = {
    "temperature": [0, -0.0, 5e-324, 1e-38, 2, -5e-324, 2.0001, HUGE],
    "top_p": [5e-324, 1e-38, 0.5, 1, 0, 1.0001],
    "min_p": [0, -0.0, 5e-324, 0.5, 1, -5e-324],
    "top_k": [-1, 0, 1, 1_000_000, -2, HUGE],
    "repetition_penalty": [0.01, 0.1, 1, 10, 0.0099, 1e-38, 1e-300, 0, HUGE],
    "frequency_penalty": [-2, 2, 5e-324, 2.0001],
    "presence_penalty": [-2, 2, 5e-324, -2.0001],
    "logit_bias": [
        {str(token): bias for token in tokens}
        for tokens in ([EOS], range(EOS), range(EOS + 1), [97], [99_999])
        for bias in (-100, 5e-324, 100)
    ],
    "seed": [-(2**63), -1, 0, 2**63 - 1, 2**63],
    "n": [1, 2, 8, 9],
    "max_tokens": [1, 2, 40, 0, 4097],
    "min_tokens": [0, 1, 40, 4096, -1],
    "ignore_eos": [True],
    "logprobs": [True],
    "top_logprobs": [0, 20, 21],
    "stop": ["e", ["\n", "ab"], "e" * 1000, ""],
    "stream_options": [{"include_usage": True, "resume": True}],
    "messages": [
        [{"role": "user", "content": "word " * 1000}],
        [
            {"role": "user", "content": "\ud83d\ude00\u0000\r\n" * 9},
            {"role": "assistant", "content": "I", "prefix": True},
        ],
    ],
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"guided_regex": "(Yes|No)( zebra){1,9}"},
    {"guided_choice": ["a", "ab", "\u00e9"]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": NAMED},
]


class Noise(ScriptedRunner):
    """Says what a hash of the last tokens says. Every `fails_every`th step raises, if it is not 0."""

    fails_every = 0

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self.steps += 1
        if self.fails_every and self.steps % self.fails_every == 0:
            raise RuntimeError("this step fails")
        rows = [self._row(chunk.sequence.tokens) for chunk in chunks for _ in range(chunk.num_logits)]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)

    def _row(self, tokens: Sequence[int]) -> torch.Tensor:
        seed = zlib.crc32(repr(tokens[-8:]).encode())
        row = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 5
        row[97:123] += 8.0
        return row


@pytest.fixture
def noise() -> Iterator[ScriptedModel]:
    model = ScriptedModel([b"a"], template=QWEN)
    model.runner.__class__ = Noise
    yield model
    model.close()


def a_request(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": 12, "stream": rng.random() < 0.7}
    for name in rng.sample(list(VALUES), rng.randint(1, 5)):
        # Mostly values within the range: a request with one outside is refused, whatever else it asks for.
        fields[name] = rng.choice(VALUES[name][: rng.choice([2, 4, 4, 4, 20])])
    if "top_logprobs" in fields:
        fields["logprobs"] = True
    if fields["stream"]:
        fields.setdefault("stream_options", {"include_usage": True})
    return {**fields, **(rng.choice(FORMS) if rng.random() < 0.5 else {})}


def a_completion(rng: random.Random) -> dict[str, Any]:
    """The same for the format of text completions."""
    own = ("messages", "logprobs", "top_logprobs")
    fields = {name: value for name, value in a_request(rng).items() if name not in (*own, "tools", "tool_choice")}
    fields["prompt"] = rng.choice(["Hello", "", [97, 98], ["a", "b<eos>", [99]], [[97] * 60, [98]], [300], "a" * 5000])
    choices = {"echo": [True], "logprobs": [0, 1, 5, 6], "return_token_ids": [True], "suffix": ["", "x"]}
    for name in rng.sample(list(choices), rng.randint(0, 3)):
        fields[name] = rng.choice(choices[name])
    if fields.get("echo") and rng.random() < 0.3:
        fields["max_tokens"] = 0
    return {**fields, "path": "/completions"}


def read(call: Call) -> tuple[str, bool, dict[str, int] | None, bool]:
    """The text that the client has, whether it has text or tokens, the usage, and whether it received an error."""
    if call.status != 200:
        return "", False, None, True
    bodies = call.events if call.data else [call.json]
    choices = [choice for body in bodies for choice in body.get("choices", ())]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    text = "".join(choice.get("text", "") for choice in choices)
    text += "".join((part.get("content") or "") + (part.get("reasoning_content") or "") for part in parts)
    text += "".join(made["function"].get("arguments", "") for part in parts for made in part.get("tool_calls") or ())
    has_tokens = any((choice.get("logprobs") or {}).get("content") for choice in choices)  # of text that is held back
    return text, bool(text) or has_tokens, bodies[-1].get("usage"), "error" in bodies[-1]


async def check(
    world: World,
    count: int,
    seed: int,
    *,
    fails: bool = False,
    draw: Callable[[random.Random], dict[str, Any]] = a_request,
) -> None:
    rng = random.Random(seed)
    served = cut = 0
    for _ in range(count):
        fields, before = draw(rng), world.charged
        call = await Call(world, **fields).done()
        await until(lambda: world.is_idle)
        charged = world.charged - before
        text, has_some, usage, failed = read(call)
        if not failed:
            served += 1
            assert usage is not None, fields
            assert charged == price(usage["prompt_tokens"], usage["completion_tokens"]) > 0, fields
        elif call.status == 422:
            assert not charged, fields
        else:
            assert fails, (fields, call.status, call.body)
            if draw is a_request:
                assert charged >= PRICE_OUT * len(text), fields  # each token is at most a character
            assert bool(charged) is has_some, fields
            assert fields["stream"] or not charged, fields
            cut += has_some
    assert (served >= count / 20 and cut >= count / 20) if fails else served >= count / 4, (served, cut)


async def test_no_request_fails_and_each_reply_is_billed_as_its_usage_says(world: World, noise: ScriptedModel) -> None:
    noise.behind(world)
    await check(world, 60, seed=1)


async def test_no_completion_fails_and_each_is_billed_as_its_usage_says(world: World, noise: ScriptedModel) -> None:
    noise.behind(world)
    await check(world, 60, seed=4, draw=a_completion)


async def test_no_completion_is_free_whenever_the_engine_fails(world: World, noise: ScriptedModel) -> None:
    noise.behind(world)
    noise.runner.fails_every = 11  # type: ignore[attr-defined]
    await check(world, 40, seed=5, fails=True, draw=a_completion)


async def test_no_text_is_free_whenever_the_engine_fails(world: World, noise: ScriptedModel) -> None:
    noise.behind(world)
    noise.runner.fails_every = 23  # type: ignore[attr-defined]
    await check(world, 40, seed=2, fails=True)


@pytest.mark.slow
@pytest.mark.parametrize("fails_every", [0, 7])
async def test_500_random_requests(world: World, noise: ScriptedModel, fails_every: int) -> None:
    noise.behind(world)
    noise.runner.fails_every = fails_every  # type: ignore[attr-defined]
    await check(world, 500, seed=3, fails=bool(fails_every))
