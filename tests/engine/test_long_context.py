"""Contexts beyond the trained length: served completely, and shorter ones are unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.contracts.generation import Delta, Event, Finished, FinishReason, SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.request import GenerationRequest
from serve_app.model.bundled import bundled_cache_dir

PROMPT_TOKENS = 17_000  # of the longest length class; 31,000 take three to six times as long
PARAGRAPH = "The keeper wrote down the wind, the water and the name of every ship that passed the light. "


async def reply(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[str, Finished]:
    request = GenerationRequest("r", prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    events: list[Event] = [event async for event in engine.generate(request)]
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]


def settings(model_path: Path, **changes: object) -> EngineSettings:
    values = {"model": str(model_path), "dtype": "int8", "kv_cache_memory": "1GiB", "max_running": 1, **changes}
    return EngineSettings(**values)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.model
async def test_a_prompt_of_17000_tokens_is_served(model_path: Path) -> None:
    engine = Engine.from_settings(settings(model_path, max_context=32768))
    try:
        paragraph = engine.chat.render([{"role": "user", "content": PARAGRAPH}])
        prompt = tuple((paragraph * (PROMPT_TOKENS // len(paragraph) + 1))[:PROMPT_TOKENS])
        text, finished = await reply(engine, prompt, 16)
        assert finished == Finished(FinishReason.LENGTH, PROMPT_TOKENS, 0, 16)
        assert text
        again, second = await reply(engine, prompt, 16)
        assert again == text
        assert second.cached_tokens >= PROMPT_TOKENS - engine.settings.block_size
        assert engine.stats().kv_blocks_used == 0
    finally:
        engine.close()


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_a_reply_within_the_trained_context_is_the_same_with_the_long_setting(
    tiny_path: Path, model_home: Path, dtype: str
) -> None:
    replies, more = [], {"kv_cache_memory": "64MiB", "cache_dir": str(bundled_cache_dir(model_home))}
    for max_context in (8192, 32768):
        engine = Engine.from_settings(settings(tiny_path, dtype=dtype, max_context=max_context, **more))
        try:
            rendered = engine.chat.render([{"role": "user", "content": PARAGRAPH * 40 + "Go on with this log."}])
            replies.append(await reply(engine, tuple(rendered), 24))
        finally:
            engine.close()
    assert replies[0] == replies[1]
