"""NaN in one request's K and V ends that request and reaches no other, on the real runners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve_app.contracts.generation import FinishReason
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import Runner
from serve_app.engine.engine import Engine
from serve_app.engine.loading.loader import load
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.scheduling.sequence import Chunk
from serve_app.engine.text.detokenizer import Vocabulary
from tests.engine.fakes import Inbox, request, submit

pytestmark = pytest.mark.model

BLOCK_BYTES = 16 * 2 * 2 * 64 * 4  # tokens, layers, K and V, the size of a head, bytes


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "transformers' own code"])
def engine(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[Engine]:
    settings = EngineSettings(
        model=str(tiny_path), fused=request.param, kv_cache_memory=22 * BLOCK_BYTES, block_size=16, speculation_rows=0
    )
    loaded = load(settings)
    runner = create_runner(loaded.model, settings, loaded.weights)
    engine = Engine(runner, Vocabulary(loaded.tokenizer), loaded.eos_token_ids, settings)
    yield engine
    engine.close()


def say(engine: Engine, *prompts: list[int]) -> list[Inbox]:
    inboxes = [Inbox() for _ in prompts]
    for number, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        submit(engine, request(str(number), prompt, tenant=str(number), max_tokens=8, ignore_eos=True), inbox)
    for inbox in inboxes:
        inbox.wait(120)
    return inboxes


def spoil(runner: Runner, request_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put NaN into all of a request's blocks after its third token."""
    execute = runner.execute

    def spoilt(chunks: list[Chunk]) -> torch.Tensor:
        for chunk in chunks:
            if chunk.sequence.request_id == request_id and chunk.sequence.num_output == 3:
                for tensors in runner.cache.layers.values():  # type: ignore[attr-defined]
                    for tensor in tensors:
                        tensor[chunk.sequence.block_table] = torch.nan
        return execute(chunks)

    monkeypatch.setattr(runner, "execute", spoilt)


def test_a_request_with_nan_changes_no_reply_beside_or_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their lengths are padded to each other; later requests get the victim's blocks and leave parts of them masked.
    victim, beside, after = [50] * 40, [60, 61, 62] * 3, [[70 + number] * 5 for number in range(8)]
    (alone,), later = say(engine, beside), say(engine, *after)
    with monkeypatch.context() as patched:
        spoil(engine._runner, "0", patched)
        ended, other = say(engine, victim, beside)
    assert ended.last.reason is FinishReason.ERROR
    assert ended.last.completion_tokens == 3
    assert (other.last.reason, other.text) == (FinishReason.LENGTH, alone.text)
    again = say(engine, *after)
    assert [inbox.last.reason for inbox in again] == [FinishReason.LENGTH] * 8
    assert [inbox.text for inbox in again] == [inbox.text for inbox in later]
    for tensors in engine._runner.cache.layers.values():  # type: ignore[attr-defined]
        used = [block for block in range(engine._runner.num_blocks) if block not in _suspects(engine)]
        assert not any(tensor[used].isnan().any() for tensor in tensors)


def _suspects(engine: Engine) -> set[int]:
    return engine._core.scheduler.allocator._suspects
