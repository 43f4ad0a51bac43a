"""Greedy replies in float32 are those of transformers' own generation, on every path of the engine.

Where one differs, a plain forward pass has to show that the two tokens are within 1e-3 of each other, which no order of
summation can tell apart for sure; and that may happen to two prompts in fifty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.contracts.generation import FinishReason
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.loading.loader import load
from serve_app.engine.models import llama_weights
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.port import EngineStats
from serve_app.engine.text.detokenizer import Vocabulary
from tests.engine.fakes import Inbox, request, submit
from tests.engine.prompts import CODE, COMPLETIONS, LONG, OTHER_SCRIPTS, QUESTIONS

pytestmark = pytest.mark.model

LENGTH = 32
NEAR = 1e-3
Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def prompts(bundled_tokenizer: Any) -> list[Prompt]:
    tokenizer = bundled_tokenizer
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]
    plain = [tokenizer(text)["input_ids"] for text in (*COMPLETIONS, *CODE, *OTHER_SCRIPTS, *LONG)]
    # All kinds are among the first ones, and among each sixteen.
    ordered = [prompt for kind in range(7) for prompt in (asked + plain)[kind::7]]
    assert len(ordered) == 50
    return [tuple(prompt) for prompt in ordered]


@pytest.fixture(scope="module")
def few(prompts: list[Prompt]) -> list[Prompt]:
    """A question, code, another script and a long one."""
    by_length = sorted(prompts, key=len)
    return [by_length[3], by_length[20], by_length[30], by_length[-6]]


class Expected:
    """Transformers' own replies, generated on first use."""

    def __init__(self, reference: Any, length: int = LENGTH) -> None:
        self.reference = reference
        self._length = length
        self._replies: dict[Prompt, list[int]] = {}

    def reply(self, prompt: Prompt) -> list[int]:
        if prompt not in self._replies:
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids, max_new_tokens=self._length, do_sample=False, attention_mask=torch.ones_like(ids)
            )
            eos = self.reference.generation_config.eos_token_id
            self._replies[prompt] = [token for token in out[0, len(prompt) :].tolist() if token != eos]
        return self._replies[prompt]

    def gap(self, prompt: Prompt, got: list[int]) -> float:
        """Between the logits of the two tokens at which a reply first differs; 0 where it does not."""
        expected = self.reply(prompt)
        if got == expected:
            return 0.0
        eos = self.reference.generation_config.eos_token_id
        left, right = [*got, eos], [*expected, eos]
        at = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
        with torch.inference_mode():
            logits = self.reference(torch.tensor([[*prompt, *expected[:at]]]), logits_to_keep=1).logits[0, -1]
        return abs(float(logits[left[at]] - logits[right[at]]))

    def check(self, prompts: list[Prompt], replies: list[list[int]]) -> None:
        gaps = {prompt: self.gap(prompt, got) for prompt, got in zip(prompts, replies, strict=True)}
        apart = [(prompt[:12], gap) for prompt, gap in gaps.items() if gap >= NEAR]
        assert not apart, "a reply differs where transformers was sure"
        assert sum(got != self.reply(prompt) for prompt, got in zip(prompts, replies, strict=True)) <= 2


@pytest.fixture(scope="module")
def expected(reference: Any) -> Expected:
    return Expected(reference)


@pytest.fixture(scope="module")
def start(model_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines as in the service, over one copy of the weights; starting one closes the one before."""
    model = load(EngineSettings(model=str(model_path)))
    weights = llama_weights.extract_weights(model.model)
    engines: list[Engine] = []

    def make(**settings: object) -> Engine:
        while engines:
            engines.pop().close()
        chosen = EngineSettings(model=str(model_path), **{"kv_cache_memory": "512MiB", **settings})  # type: ignore[arg-type]
        runner = create_runner(model.model, chosen, weights)
        engines.append(Engine(runner, Vocabulary(model.tokenizer), model.eos_token_ids, chosen))
        return engines[-1]

    yield make
    while engines:
        engines.pop().close()


def generate(engine: Engine, prompts: list[Prompt], **sampling: object) -> list[list[int]]:
    """Generates all at once and returns the output tokens, which the engine itself only returns as text."""
    inboxes, outputs = [], []
    for number, prompt in enumerate(prompts):
        inboxes.append(Inbox())
        submit(engine, request(str(number), prompt, **{"max_tokens": LENGTH, **sampling}), inboxes[-1])
        outputs.append(engine._core.by_id[str(number)].tokens)
    for inbox in inboxes:
        assert inbox.wait(300).reason in (FinishReason.STOP, FinishReason.LENGTH)
    return [tokens[len(prompt) :] for tokens, prompt in zip(outputs, prompts, strict=True)]


def one_by_one(engine: Engine, prompts: list[Prompt]) -> list[list[int]]:
    return [generate(engine, [prompt])[0] for prompt in prompts]


def twice(engine: Engine, prompts: list[Prompt]) -> list[list[int]]:
    """The second run finds its prefixes in the cache."""
    generate(engine, prompts)
    before = engine.stats().prefix_hit_tokens
    replies = generate(engine, prompts)
    assert engine.stats().prefix_hit_tokens - before > sum(len(prompt) - 17 for prompt in prompts if len(prompt) > 17)
    return replies


def guessed(stats: EngineStats) -> bool:
    return stats.accepted > 0


def preempted(stats: EngineStats) -> bool:
    return stats.preemptions > 0


def anything(stats: EngineStats) -> bool:
    return True


WAYS = {
    "alone": ({"speculation_rows": 0, "prefix_reuse": False}, one_by_one, anything),
    "alone, guessing": ({}, one_by_one, guessed),
    "with 15 others": ({"max_running": 16, "speculation_rows": 0, "prefix_reuse": False}, generate, anything),
    "over found prefixes": ({"max_running": 16}, twice, anything),
    "in chunks, guessing": (
        {
            "max_running": 16,
            "prefill_chunk": 24,
            "prefill_chunk_busy": 20,
            "speculation_rows": 32,
            "prefix_reuse": False,
        },
        generate,
        guessed,
    ),
    "preempted": ({"max_running": 16, "block_size": 8, "kv_cache_memory": "44MiB"}, generate, preempted),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_fifty_greedy_replies_are_those_of_transformers(
    start: Callable[..., Engine], prompts: list[Prompt], expected: Expected, way: str
) -> None:
    settings, run, happened = WAYS[way]
    if run is one_by_one:  # ten of them, since each waits for the one before
        prompts = prompts[::5]
    engine = start(**settings)
    expected.check(prompts, run(engine, prompts))
    assert happened(engine.stats())
    assert engine.stats().kv_blocks_used == 0


def test_a_few_greedy_replies_are_those_of_transformers(
    start: Callable[..., Engine], few: list[Prompt], expected: Expected
) -> None:
    settings, _, _ = WAYS["in chunks, guessing"]
    Expected(expected.reference, 16).check(few, generate(start(**settings), few, max_tokens=16))


def test_the_token_count_is_the_tokenizers_own(start: Callable[..., Engine], bundled_tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = bundled_tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    inbox = Inbox()
    submit(start(), request(prompt=prompt, max_tokens=50), inbox)
    assert inbox.wait(300).reason is FinishReason.STOP
    assert "Paris" in inbox.text
    assert inbox.last.completion_tokens == len(bundled_tokenizer(inbox.text)["input_ids"])
