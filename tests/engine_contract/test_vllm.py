"""Tests for vLLM alone: its settings, turns before its own scheduler, its counts, and the death of its process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm", reason="vLLM has an environment of its own: `make test-vllm`")

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.contracts.generation import Delta, FinishReason, Grammar, GrammarKind
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import EngineClosed, EngineFailed, ModelError, RequestRefused, UnsupportedGrammar
from serve_app.engine.vllm_adapter import start as starting
from serve_app.engine.vllm_adapter.start import engine_arguments, start
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


@pytest.mark.parametrize(
    ("given", "sequences"), [({}, 1024), ({"max_running": 32}, 36), ({"max_running": 4}, 5)], ids=str
)
async def test_vllm_runs_with_its_own_sizes_for_an_api_server_on_the_gpu(
    model_path: Path, given: dict[str, int], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h100 = {UsageContext.OPENAI_API_SERVER: 8192}, {UsageContext.OPENAI_API_SERVER: 1024}
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", classmethod(lambda *_: on_h100))
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda config, **_: config)
    chosen = EngineSettings(model=str(model_path), **given)
    config, _ = await starting._start(engine_arguments(chosen, VllmSettings(), model_path, "float32"), None)  # type: ignore[arg-type]
    scheduler = config.scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, sequences)


async def test_what_vllm_counts_is_exported_under_its_names(roomy: Asker) -> None:
    def tokens() -> float:
        [found] = [sample for sample in roomy.engine.samples() if sample.name == "vllm_generation_tokens"]
        assert found.kind == "counter"
        assert found.labels["model_name"]
        return found.value

    await roomy.until_idle()
    before = tokens()
    await roomy.ask("A river", max_tokens=12, ignore_eos=True)
    await roomy.until_idle()
    assert tokens() - before == 12
    samples = list(roomy.engine.samples())
    assert all(re.fullmatch(r"vllm_[a-z0-9_]+", sample.name) for sample in samples)
    buckets = [s.value for s in samples if s.name == "vllm_inter_token_latency_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] >= 11
    assert len({(s.name, *s.labels.values()) for s in samples}) == len(samples)


async def test_a_request_that_vllm_refuses_is_the_requests_fault_and_leaves_nothing_behind(
    roomy: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestRefused) as caught:
        await roomy.ask(repetition_penalty=-1.0)  # refused when its parameters are made
    assert caught.value.param == "repetition_penalty"

    def refuse(params: object) -> None:
        raise VLLMValidationError("min_p is not for this model", parameter="min_p", value=0.1)

    engine = roomy.engine
    assert isinstance(engine, VllmEngine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.input_processor, "validate_logits_processors_params", refuse)
        with pytest.raises(RequestRefused, match="min_p is not for this model") as caught:  # once it has its turn
            await roomy.ask(min_p=0.1)
        assert caught.value.param == "min_p"
        assert "value=" not in str(caught.value)

        def refuse_grammar(params: object) -> None:
            raise VLLMValidationError("Structured outputs are not for this model")

        patch.setattr(engine._llm.input_processor, "validate_logits_processors_params", refuse_grammar)
        with pytest.raises(UnsupportedGrammar, match="Structured outputs are not for this model"):
            await roomy.ask(grammar=Grammar(GrammarKind.JSON_OBJECT))
    await roomy.until_idle()
    assert (await roomy.ask(max_tokens=3, ignore_eos=True)).end.completion_tokens == 3


def test_a_context_that_does_not_fit_the_memory_is_refused_and_the_remedies_help(model_path: Path) -> None:
    options = VllmSettings(further={"enforce_eager": True})
    with pytest.raises(ModelError, match=r"of the 4096 tokens of max_context") as caught:
        start(settings(model_path, kv_cache_memory="32MiB", max_context=4096), options)
    [memory, context] = re.findall(r"kv_cache_memory to (\S+), or max_context to (\d+)", str(caught.value))[0]
    for given in (
        {"kv_cache_memory": memory, "max_context": 4096},
        {"kv_cache_memory": "32MiB", "max_context": context},
    ):
        engine = start(settings(model_path, **given), options)
        assert engine.max_context == int(given["max_context"])
        engine.close()


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
