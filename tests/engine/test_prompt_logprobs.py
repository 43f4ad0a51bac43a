"""Log-probabilities of prompts equal transformers' logits, however a prompt is divided into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.contracts.generation import Finished, FinishReason, PromptScored, Started, TokenLogprob
from serve_app.engine import core
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.loading.loader import load
from serve_app.engine.models import llama_weights
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.text.detokenizer import Vocabulary
from serve_app.engine.text.prompt_scores import PromptScores
from tests.engine.fakes import (
    POISON,
    FakeRunner,
    Inbox,
    MemoryRunner,
    SteppedEngine,
    byte_tokenizer,
    next_token_logits,
    request,
    submit,
)

TOP = 5


def scored(inbox: Inbox) -> list[TokenLogprob]:
    return [token for event in inbox.events if isinstance(event, PromptScored) for token in event.tokens]


def check(tokens: list[TokenLogprob], prompt: tuple[int, ...], logits: torch.Tensor, atol: float) -> None:
    """Compares with logits (n, vocabulary) of the prompt's positions."""
    expected = logits.float().log_softmax(-1)
    assert tuple(token.token for token in tokens) == prompt
    assert (tokens[0].logprob, tokens[0].top) == (0.0, ())
    for at, token in enumerate(tokens[1:], 1):
        row = expected[at - 1]
        assert token.logprob == pytest.approx(row[prompt[at]].item(), abs=atol)
        assert [one.logprob for one in token.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=atol)
        for one in token.top:
            assert one.logprob == pytest.approx(row[one.token].item(), abs=atol)


@pytest.fixture(scope="module")
def prompts(bundled_tokenizer: Any) -> list[tuple[int, ...]]:
    texts = ["The river runs past the mill and the old harbour. " * 12, "Grüße aus 東京! " * 5, "x"]
    return [tuple(bundled_tokenizer(text)["input_ids"]) for text in texts]


@pytest.fixture(scope="module")
def start(tiny_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines with joined weights, as in the service."""
    model = load(EngineSettings(model=str(tiny_path), kv_cache_memory="64MiB"))
    weights = llama_weights.extract_weights(model.model)
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        chosen = EngineSettings(model=str(tiny_path), **{"kv_cache_memory": "64MiB", **settings})
        runner = create_runner(model.model, chosen, weights)
        engines.append(Engine(runner, Vocabulary(model.tokenizer), model.eos_token_ids, chosen))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def run_beside_others(engine: Engine, prompts: list[tuple[int, ...]]) -> list[list[TokenLogprob]]:
    others = [Inbox() for _ in range(2)]
    for number, inbox in enumerate(others):
        submit(engine, request(f"other {number}", (7, 8, 9 + number), max_tokens=60, ignore_eos=True), inbox)
    inboxes = [Inbox() for _ in prompts]
    for number, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        asked = request(str(number), prompt, max_tokens=number, prompt_logprobs=TOP)
        submit(engine, asked, inbox)
    for inbox in (*inboxes, *others):
        assert inbox.wait(120).reason in (FinishReason.LENGTH, FinishReason.STOP)
    return [scored(inbox) for inbox in inboxes]


@pytest.mark.model
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("rows", [16, 10_000])
def test_prompts_in_chunks_beside_other_requests_have_the_scores_of_transformers(
    prompts: list[tuple[int, ...]],
    tiny_reference: Any,
    make_engine: Callable[..., Engine],
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    joined: bool,
    rows: int,
) -> None:
    monkeypatch.setattr(core, "_SCORED_BYTES", 4 * 49152 * rows)
    engine = (start if joined else make_engine)(prefill_chunk=48)
    for prompt, found in zip(prompts, run_beside_others(engine, prompts), strict=True):
        with torch.inference_mode():
            logits = tiny_reference(torch.tensor([prompt])).logits[0]
        check(found, prompt, logits, 1e-3)


@pytest.mark.model
def test_in_int8_a_prompt_has_the_very_scores_that_its_tokens_had_in_a_reply(
    tiny_path: Path, prompts: list[tuple[int, ...]], model_home: Path
) -> None:
    from serve_app.model.bundled import bundled_cache_dir

    cache = str(bundled_cache_dir(model_home))
    settings = EngineSettings(model=str(tiny_path), dtype="int8", kv_cache_memory="64MiB", cache_dir=cache)
    engine = Engine.from_settings(settings)
    try:
        said = Inbox()
        asked = request("said", prompts[1], max_tokens=40, ignore_eos=True, logprobs=TOP, token_ids=True)
        submit(engine, asked, said)
        said.wait(120)
        reply = [token for event in said.events for token in getattr(event, "tokens", ())]
        whole = prompts[1] + tuple(token.token for token in reply)
        found = run_beside_others(engine, [whole])[0][len(prompts[1]) :]
    finally:
        engine.close()
    assert [(one.logprob, one.top) for one in found] == [(one.logprob, one.top) for one in reply]


def stepped(**settings: Any) -> SteppedEngine:
    return SteppedEngine(MemoryRunner(64, 4, (1024,)), **settings)


def logits_of(prompt: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([next_token_logits([token * 8 for token in prompt[: at + 1]]) for at in range(len(prompt))])


PROMPT = tuple(97 + number % 7 for number in range(90))


def test_a_step_has_few_rows_of_logits_and_other_prompts_go_on_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_SCORED_BYTES", 4 * 257 * 16)
    engine = stepped(prefill_chunk=64)
    inboxes = [engine.submit(request(str(n), PROMPT, max_tokens=0, prompt_logprobs=TOP)) for n in range(2)]
    other = engine.submit(request("other", PROMPT, tenant="b", max_tokens=1))
    rows = []
    while engine.core.streams:
        plan = engine.step()
        rows.append(sum(chunk.num_logits for chunk in plan.chunks if chunk.is_scored))
    assert max(rows) == 16
    assert other.first[Finished] <= 3
    for inbox in inboxes:
        check(scored(inbox), PROMPT, logits_of(PROMPT), 1e-4)


def test_scores_survive_a_preemption_and_a_step_that_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_SCORED_BYTES", 4 * 257 * 16)
    engine = stepped(prefill_chunk=32)
    inbox = engine.submit(request("r", PROMPT, max_tokens=3, prompt_logprobs=TOP))
    engine.step()
    scheduler = engine.core.scheduler
    scheduler._preempt(scheduler.running[0])
    plan = engine.core.plan(0.0)
    for half in plan.halves():
        streams = [engine.core.streams[chunk.sequence] for chunk in half.chunks]
        engine.core.commit(half, engine.core.compute(half, streams), 0.0)
    engine.run()
    check(scored(inbox), PROMPT, logits_of(PROMPT), 1e-4)
    assert sum(isinstance(event, Started) for event in inbox.events) == 1


def test_no_score_is_sent_before_the_prompt_is_whole() -> None:
    engine = stepped(prefill_chunk=32)
    inbox = engine.submit(request("r", PROMPT, max_tokens=3, prompt_logprobs=TOP))
    engine.step()
    engine.step()
    assert [type(event) for event in inbox.events] == [Started]
    engine.abort("r")
    assert not scored(inbox)


def test_a_prompt_whose_logits_are_no_numbers_ends_with_an_error() -> None:
    engine = stepped()
    inbox = engine.submit(request("r", (97, POISON, 98), max_tokens=0, prompt_logprobs=TOP))
    engine.run()
    assert inbox.last.reason is FinishReason.ERROR
    assert not scored(inbox)


def test_the_scores_of_a_long_prompt_come_in_pieces() -> None:
    engine = SteppedEngine(FakeRunner(num_blocks=1024, max_context=4096))
    inbox = engine.submit(request("r", (97,) * 600, max_tokens=1, prompt_logprobs=0))
    engine.run()
    pieces = [len(event.tokens) for event in inbox.events if isinstance(event, PromptScored)]
    assert pieces == [256, 256, 88]


def test_scores_that_are_known_are_kept_when_they_come_again() -> None:
    scores = PromptScores(Vocabulary(byte_tokenizer()), (1, 2, 3, 4))
    scores.add(1, [(-1.0, ()), (-2.0, ())])
    scores.add(1, [(-9.0, ())])
    scores.add(2, [(-9.0, ()), (-3.0, ())])
    [event] = scores.take()
    assert [token.logprob for token in event.tokens] == [0.0, -1.0, -2.0, -3.0]
    assert not list(scores.take())


async def test_a_token_outside_the_vocabulary_is_refused_by_name(make_engine: Callable[..., Engine]) -> None:
    from serve_app.engine.errors import RequestRefused

    engine = make_engine()
    with pytest.raises(RequestRefused) as refused:
        await anext(engine.generate(request("r", (10**6,), max_tokens=1)))
    assert refused.value.param == "prompt"


def test_a_prompt_that_is_in_the_cache_is_scored_from_its_beginning_and_found_there_later() -> None:
    engine = stepped()
    cached = []
    for name, options in (("first", {}), ("scored", {"prompt_logprobs": TOP}), ("last", {})):
        inbox = engine.submit(request(name, PROMPT, tenant="a", max_tokens=2, **options))
        engine.run()
        cached.append(inbox.last.cached_tokens)
        if options:
            check(scored(inbox), PROMPT, logits_of(PROMPT), 1e-4)
    assert cached[0] == cached[1] == 0
    assert cached[2] == len(PROMPT) // 4 * 4
