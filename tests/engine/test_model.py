"""The engine over transformers' own code, held against transformers' own generation, on the tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serve_app.contracts.generation import FinishReason, SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.loading.loader import LoadedModel
from serve_app.engine.request import GenerationRequest
from tests.engine.fakes import Inbox, submit

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "用一句话介绍北京。",
    "def fibonacci(n):",
    "Name three fruits, then say why you like each of them. Answer briefly. " * 6,
]
LENGTH = 16


@pytest.fixture(scope="module")
def prompts(tiny: LoadedModel) -> list[tuple[int, ...]]:
    template = tiny.tokenizer.apply_chat_template
    return [
        tuple(template([{"role": "user", "content": q}], add_generation_prompt=True)["input_ids"]) for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected(tiny_reference: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy continuations by transformers."""
    replies = []
    for prompt in prompts:
        out = tiny_reference.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
        replies.append(
            [t for t in out[0, len(prompt) :].tolist() if t != tiny_reference.generation_config.eos_token_id]
        )
    return replies


def run(engine: Engine, prompts: list[tuple[int, ...]], **sampling: object) -> list[list[int]]:
    """Generate all at once; the output tokens of each, which the engine itself only returns as text."""
    outputs: dict[str, list[int]] = {}
    inboxes = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": LENGTH, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        inboxes.append(Inbox())
        submit(engine, GenerationRequest(str(number), prompt, params), inboxes[-1])
        sequence = engine._core.by_id.get(str(number))
        assert sequence is not None
        outputs[str(number)] = sequence.tokens
    for inbox in inboxes:
        assert inbox.wait(120).reason in (FinishReason.STOP, FinishReason.LENGTH)
    return [outputs[str(n)][len(p) :] for n, p in enumerate(prompts)]


def assert_same_or_tied(reference: Any, prompt: tuple[int, ...], got: list[int], expected: list[int]) -> None:
    """Equal, or first apart at a token where the reference's two candidates are within 1e-3 of each other."""
    if got == expected:
        return
    eos = reference.generation_config.eos_token_id
    left, right = [*got, eos], [*expected, eos]
    at = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *expected[:at]]]), logits_to_keep=1).logits[0, -1]
    assert abs(float(logits[left[at]] - logits[right[at]])) < 1e-3, (at, got, expected)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"prefill_chunk": 7, "prefill_chunk_busy": 3}, id="chunked"),
        pytest.param({"block_size": 5, "max_running": 2}, id="odd blocks, queueing"),
    ],
)
def test_greedy_replies_are_those_of_transformers_in_a_batch(
    make_engine: Callable[..., Engine],
    tiny_reference: Any,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    settings: dict[str, int],
) -> None:
    for prompt, got, wanted in zip(prompts, run(make_engine(**settings), prompts), expected, strict=True):
        assert_same_or_tied(tiny_reference, prompt, got, wanted)


def test_greedy_replies_are_those_of_transformers_alone(
    make_engine: Callable[..., Engine], tiny_reference: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    engine = make_engine()
    for prompt, wanted in zip(prompts[:2], expected, strict=False):
        assert_same_or_tied(tiny_reference, prompt, run(engine, [prompt])[0], wanted)


@pytest.mark.parametrize("reuse", [False, True])
def test_greedy_replies_survive_preemption(
    make_engine: Callable[..., Engine],
    tiny_reference: Any,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    reuse: bool,
) -> None:
    long = [i for i in range(4) if len(expected[i]) == LENGTH]
    assert len(long) >= 2
    block_size, per_token = 4, 2 * 2 * 1 * 64 * 4  # layers, K and V, heads, size, bytes
    blocks = sum(-(-(len(prompts[i]) + LENGTH - 1) // block_size) for i in long)
    if reuse:  # the beginning of the template is stored once
        columns = zip(*(prompts[i] for i in long), strict=False)
        common = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
        blocks -= common // block_size * (len(long) - 1)
    blocks = blocks * 3 // 4  # too few for all at their ends, although some may begin later
    memory = blocks * block_size * per_token
    # In step with each other, so that they reach their ends together.
    steady = {"prefill_chunk_busy": 512, "speculation_rows": 0}
    engine = make_engine(kv_cache_memory=memory, block_size=block_size, prefix_reuse=reuse, **steady)
    for _ in range(100):  # one may have ended before another begins
        for i, got in zip(long, run(engine, [prompts[i] for i in long]), strict=True):
            assert_same_or_tied(tiny_reference, prompts[i], got, expected[i])
        if engine.stats().preemptions > 0:
            break
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"prefill_chunk": 7, "prefill_chunk_busy": 3, "block_size": 4}, id="chunked"),
        pytest.param({"block_size": 5, "max_running": 2}, id="odd blocks, queueing"),
    ],
)
def test_greedy_replies_are_the_same_over_a_prefix_that_was_found(
    make_engine: Callable[..., Engine],
    tiny_reference: Any,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    settings: dict[str, int],
) -> None:
    engine = make_engine(**settings)
    run(engine, prompts)
    for prompt, got, wanted in zip(prompts, run(engine, prompts), expected, strict=True):  # in a batch
        assert_same_or_tied(tiny_reference, prompt, got, wanted)
    found = engine.stats().prefix_hit_tokens
    size = engine.settings.block_size
    assert found >= sum((len(prompt) - 1) // size * size for prompt in prompts)
    assert_same_or_tied(tiny_reference, prompts[4], run(engine, prompts[4:])[0], expected[4])  # alone
    assert engine.stats().prefix_hit_tokens - found == (len(prompts[4]) - 1) // size * size
    assert engine.stats().kv_blocks_used == 0


def test_a_conversations_next_turn_is_the_same_with_and_without_reuse(
    make_engine: Callable[..., Engine],
) -> None:
    messages = [{"role": "user", "content": "Tell me three facts about the moon."}]
    turns: dict[bool, list[tuple[str, int, int]]] = {}
    for reuse in (False, True):
        engine, talk = make_engine(prefix_reuse=reuse), list(messages)
        for question in ("Now say that in one sentence.", "In five words?", ""):
            inbox, prompt = Inbox(), tuple(engine.chat.render(talk))
            params = SamplingParams(max_tokens=24, temperature=0.0)
            submit(engine, GenerationRequest("turn", prompt, params), inbox)
            final = inbox.wait()
            turns.setdefault(reuse, []).append((inbox.text, len(prompt), final.cached_tokens))
            talk += [{"role": "assistant", "content": inbox.text}, {"role": "user", "content": question}]
    assert [text for text, _, _ in turns[True]] == [text for text, _, _ in turns[False]]
    assert [cached for _, _, cached in turns[False]] == [0, 0, 0]
    # Each turn finds at least the whole blocks of the prompt before it.
    for (_, before, _), (_, _, cached) in itertools.pairwise(turns[True]):
        assert cached >= before // 16 * 16 > 0


def test_a_seeded_reply_is_the_same_alone_and_in_a_batch(
    make_engine: Callable[..., Engine], prompts: list[tuple[int, ...]]
) -> None:
    engine = make_engine()
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 42}
    together = run(engine, prompts[:4], **options)
    assert run(engine, prompts[1:2], **options) == together[1:2]
    assert run(engine, prompts[1:2], temperature=0.9, top_p=0.95, seed=43) != together[1:2]


def test_seeded_replies_are_the_same_with_and_without_guesses(
    make_engine: Callable[..., Engine], prompts: list[tuple[int, ...]]
) -> None:
    # A few tokens alone, so that the reply repeats itself and guesses come.
    bias = tuple((token, 100.0) for token in range(300, 305))
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "logit_bias": bias, "max_tokens": 48}
    plain = run(make_engine(speculation_rows=0), prompts[:2], **options)
    engine = make_engine(speculation_rows=24)
    assert run(engine, prompts[:2], **options) == plain
    assert engine.stats().drafted > engine.stats().accepted > 0
