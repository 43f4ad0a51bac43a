"""Tests for vLLM alone: its settings, turns before its own scheduler, its counts, and the death of its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm", reason="vLLM has an environment of its own: `make test-vllm`")

from serve_app.contracts.generation import Delta, FinishReason
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import EngineClosed, EngineFailed, ModelError
from serve_app.engine.vllm_adapter.start import start
from serve_app.engine.vllm_adapter.vllm_engine import VllmEngine
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings

from .replies import Asker

pytestmark = pytest.mark.model
LONG = "The river runs past the mill, the bridge and the old harbour. " * 20


def settings(model_path: Path, **more: object) -> EngineSettings:
    return EngineSettings(model=str(model_path), dtype="float32", max_running=8, max_waiting=64, **more)


@pytest.fixture(scope="module")
def adapter(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the bundled model, with random weights that change what it says."""
    config = json.loads((model_path / "config.json").read_text())
    size, rank = config["hidden_size"], 8
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(config["num_hidden_layers"])
        for part, shape in (("A", (rank, size)), ("B", (size, rank)))
    }
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def roomy(model_path: Path, adapter: Path) -> Iterator[Asker]:
    """An engine with a queue for fifty and an adapter. The last test kills its process."""
    further = {"enforce_eager": True, "max_num_batched_tokens": 512}
    options = VllmSettings(adapters={"other": str(adapter)}, further=further)
    engine = start(settings(model_path, kv_cache_memory="512MiB"), options)
    yield Asker(engine)
    engine.close()


async def steps_to_first_token(asker: Asker, queued: int) -> int:
    """Counts the steps to the first token of a single account's request, while another account has `queued` of them."""
    crowd = [asker.request(f"{n}. {LONG}", tenant="crowd", max_tokens=30, ignore_eos=True) for n in range(queued)]
    tasks = [asyncio.create_task(asker.run(request)) for request in crowd]
    async with asyncio.timeout(120):
        while asker.engine.stats().running < min(queued, 8):
            await asyncio.sleep(0.01)
    before = asker.engine.stats().steps
    async for event in asker.engine.generate(asker.request("One lake", tenant="single", max_tokens=4)):
        if isinstance(event, Delta):
            break
    steps = asker.engine.stats().steps - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asker.until_idle()
    return steps


async def test_a_single_requests_first_token_comes_within_twice_the_steps_although_fifty_wait(roomy: Asker) -> None:
    await roomy.ask("Warm up.")
    beside_two = await steps_to_first_token(roomy, 2)
    beside_fifty = await steps_to_first_token(roomy, 50)
    assert beside_fifty <= 2 * beside_two, (beside_two, beside_fifty)


async def test_what_is_billed_is_what_vllm_counts(roomy: Asker) -> None:
    await roomy.until_idle()
    before = roomy.engine.stats()
    replies = await asyncio.gather(*(roomy.ask(f"River {n}", max_tokens=10 + n, ignore_eos=True) for n in range(8)))
    await roomy.until_idle()
    after = roomy.engine.stats()
    assert after.tokens_produced - before.tokens_produced == sum(reply.end.completion_tokens for reply in replies)
    assert after.prompt_tokens - before.prompt_tokens == sum(reply.end.prompt_tokens for reply in replies)


async def test_an_adapter_replies_for_those_who_name_it_and_shares_no_prompt_with_the_model(roomy: Asker) -> None:
    plain = await roomy.ask(LONG, tenant="one", ignore_eos=True)
    adapted = await roomy.ask(LONG, tenant="one", adapter="other", ignore_eos=True)
    assert adapted.text != plain.text
    assert adapted.end.cached_tokens == 0
    assert (await roomy.ask(LONG, tenant="one", ignore_eos=True)).text == plain.text
    assert (await roomy.ask(LONG, tenant="one", adapter="other", ignore_eos=True)).text == adapted.text
    with pytest.raises(ValueError, match="no adapter"):
        await roomy.ask(adapter="third")


def test_an_argument_that_vllm_does_not_have_is_named_with_the_nearest_one(model_path: Path) -> None:
    with pytest.raises(ModelError, match=r"vllm\.max_num_batch_tokens.*do you mean max_num_batched_tokens"):
        start(settings(model_path), VllmSettings(further={"max_num_batch_tokens": 512}))


def test_a_gpu_for_the_cpu_build_is_refused(model_path: Path) -> None:
    with pytest.raises(ModelError, match="vLLM's CPU build"):
        start(settings(model_path), VllmSettings(), gpus=1)


def test_memory_for_not_even_a_block_is_refused_in_one_line(model_path: Path) -> None:
    with pytest.raises(ModelError, match="vLLM did not start") as caught:
        start(settings(model_path, kv_cache_memory="1MiB"), VllmSettings(further={"enforce_eager": True}))
    assert "\n" not in str(caught.value)


async def test_when_its_process_dies_requests_end_with_an_error_and_the_engine_says_so(roomy: Asker) -> None:
    engine = roomy.engine
    assert isinstance(engine, VllmEngine)
    replies = [asyncio.create_task(roomy.ask(f"River {n}", max_tokens=400, ignore_eos=True)) for n in range(3)]
    async with asyncio.timeout(60):
        while engine.stats().running < 3:
            await asyncio.sleep(0.01)
    own = [child for child in psutil.Process().children(recursive=True) if "Engine" in " ".join(child.cmdline())]
    assert own, psutil.Process().children(recursive=True)
    for process in own:
        os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert {reply.end.reason for reply in await asyncio.gather(*replies)} == {FinishReason.ABORT}
    with pytest.raises(EngineFailed):
        engine.check_health()
    with pytest.raises(EngineClosed):
        await roomy.ask("Too late.")
    assert engine.stats().running == 0
