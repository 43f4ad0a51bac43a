"""Tests for vLLM alone: its settings, turns before its own scheduler, its counts, adapters, and its process's end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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

from serve_app.contracts.generation import Delta, Finished, FinishReason, Grammar, GrammarKind
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import (
    EngineClosed,
    EngineFailed,
    ModelError,
    RequestRefused,
    UnknownAdapter,
    UnsupportedGrammar,
)
from serve_app.engine.vllm_adapter import start as starting
from serve_app.engine.vllm_adapter.start import engine_arguments, start
from serve_app.engine.vllm_adapter.vllm_engine import VllmEngine
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings

from .replies import Asker, Reply

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
LONG = "The river runs past the mill, the bridge and the old harbour. " * 20


def settings(model_path: Path, **more: object) -> EngineSettings:
    return EngineSettings(model=str(model_path), dtype="float32", max_running=8, max_waiting=64, **more)


MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="module")
def make_adapter(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """Makes LoRA adapters of the bundled model, with random weights that change what it says."""
    config = json.loads((model_path / "config.json").read_text())
    size, layers = config["hidden_size"], config["num_hidden_layers"]

    def make(seed: int = 0, rank: int = 8, size: int = size) -> Path:
        return write_adapter(tmp_path_factory.mktemp("adapter"), seed, rank, size, layers)

    return make


def write_adapter(folder: Path, seed: int, rank: int, size: int, layers: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(layers)
        for part, shape in (("A", (rank, size)), ("B", (size, rank)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def roomy(model_path: Path) -> Iterator[Asker]:
    """An engine with a queue for fifty, and room for two adapters, one at a time. The last test kills its process."""
    options = VllmSettings(max_loras=1, max_cpu_loras=2, further={"enforce_eager": True, "max_num_batched_tokens": 512})
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


async def test_an_adapter_replies_for_those_who_name_it_and_shares_no_prompt_with_the_model(
    roomy: Asker, make_adapter: MakeAdapter
) -> None:
    roomy.engine.set_adapters({"other": str(make_adapter())})
    plain = await roomy.ask(LONG, tenant="one", ignore_eos=True)
    adapted = await roomy.ask(LONG, tenant="one", adapter="other", ignore_eos=True)
    assert adapted.text != plain.text
    assert adapted.end.cached_tokens == 0
    assert (await roomy.ask(LONG, tenant="one", ignore_eos=True)).text == plain.text
    assert (await roomy.ask(LONG, tenant="one", adapter="other", ignore_eos=True)).text == adapted.text
    with pytest.raises(UnknownAdapter, match="no adapter"):
        await roomy.ask(adapter="third")
    assert adapted.started is not None
    assert plain.started is not None
    assert adapted.started.fingerprint == roomy.engine.fingerprint_of("other")
    assert not plain.started.fingerprint, "the replica adds the engine's"


def held_adapters(asker: Asker) -> int:
    """The number of adapters that vLLM holds."""
    engine = asker.engine
    assert isinstance(engine, VllmEngine)
    return len(asyncio.run_coroutine_threadsafe(engine._llm.list_loras(), engine._loop).result(PATIENCE_S))


async def started(asker: Asker, **options: object) -> asyncio.Task[Reply]:
    """A long reply, of which there is some text already."""
    request = asker.request("Tell me about rivers.", max_tokens=120, ignore_eos=True, **options)
    begun = asyncio.Event()

    async def run() -> Reply:
        reply = Reply()
        async for event in asker.engine.generate(request):
            match event:
                case Delta():
                    reply.deltas.append(event)
                    begun.set()
                case Finished():
                    reply.finished = event
        return reply

    task = asyncio.create_task(run())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    return task


async def test_adapters_come_and_go_while_requests_run(roomy: Asker, make_adapter: MakeAdapter) -> None:
    law, tax, art = (str(make_adapter(seed)) for seed in (1, 2, 3))
    roomy.engine.set_adapters({"law": law})
    in_flight = [await started(roomy, adapter="law"), await started(roomy)]
    roomy.engine.set_adapters({"law": law, "tax": tax})
    texts = {adapter: (await roomy.ask(adapter=adapter, ignore_eos=True)).text for adapter in ("law", "tax", "")}
    assert len(set(texts.values())) == 3
    assert held_adapters(roomy) == 2
    in_flight.append(await started(roomy, adapter="law"))
    roomy.engine.set_adapters({"tax": tax, "art": art})  # `art` has to wait for the place of `law`
    with pytest.raises(UnknownAdapter):
        await roomy.ask(adapter="law")
    assert (await roomy.ask(adapter="art", ignore_eos=True)).text not in texts.values()
    for reply in await asyncio.gather(*in_flight):
        assert (reply.end.reason, reply.end.completion_tokens) == (FinishReason.LENGTH, 120)
    assert (await roomy.ask(adapter="tax", ignore_eos=True)).text == texts["tax"]
    assert held_adapters(roomy) == 2
    roomy.engine.set_adapters({"law": tax})
    assert (await roomy.ask(adapter="law", ignore_eos=True)).text == texts["tax"], "the name has another adapter now"
    roomy.engine.set_adapters({})
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(held_adapters, roomy):
            await asyncio.sleep(0.01)


async def test_an_adapter_that_can_not_be_loaded_ends_its_own_requests_alone(
    roomy: Asker, make_adapter: MakeAdapter
) -> None:
    good, other, torn, empty = (make_adapter(seed) for seed in (1, 2, 3, 4))
    weights = torn / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (empty / "adapter_model.safetensors").unlink()
    broken = {"torn": torn, "empty": empty, "large": make_adapter(rank=32), "odd": make_adapter(size=4096)}
    roomy.engine.set_adapters({"good": str(good)})
    beside = await started(roomy, adapter="good")
    for name, folder in broken.items():
        roomy.engine.set_adapters({"good": str(good), name: str(folder)})
        with pytest.raises(UnknownAdapter, match=f"'{name}' is not loaded: "):
            await roomy.ask(adapter=name)
    assert (await beside).end.completion_tokens == 120
    roomy.engine.set_adapters({"good": str(good), "other": str(other)})
    texts = [(await roomy.ask(adapter=name, ignore_eos=True)).text for name in ("good", "other")]
    for folder in (good, other):  # no step reads the files again, although one adapter leaves the GPU for the other
        (folder / "adapter_model.safetensors").unlink()
    for _ in range(2):
        assert [(await roomy.ask(adapter=name, ignore_eos=True)).text for name in ("good", "other")] == texts
    roomy.engine.check_health()


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


def vllm_processes(process: psutil.Process, kind: str = "") -> list[psutil.Process]:
    """Returns the processes of vLLM below a process: one VLLM::EngineCore, and one VLLM::Worker for each device."""
    return [child for child in process.children(recursive=True) if f"VLLM::{kind}" in " ".join(child.cmdline())]


def assert_ended(ends: list[int]) -> None:
    """Waits for the end of processes, given as file descriptors."""
    for end in ends:
        assert select.select([end], [], [], PATIENCE_S)[0], "the process lives on"
        os.close(end)


HOLDER = """
import sys, threading
from pathlib import Path
from serve_app.engine.config import EngineSettings
from serve_app.engine.vllm_adapter.start import start
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings

if __name__ == "__main__":
    small = {"kv_cache_memory": "64MiB", "max_running": 2, "max_context": 1024}
    settings = EngineSettings(model=sys.argv[1], dtype="float32", **small)
    engine = start(settings, VllmSettings(further={"enforce_eager": True}))
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_its_processes_end_with_a_replica_that_is_killed(model_path: Path, tmp_path: Path) -> None:
    program = tmp_path / "holder.py"
    program.write_text(HOLDER)
    holder = subprocess.Popen(
        [sys.executable, str(program), str(model_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout is not None
    try:
        assert any(line.strip() == "ready" for line in holder.stdout), "it did not start"
        processes = vllm_processes(psutil.Process(holder.pid))
        ends = [os.pidfd_open(process.pid) for process in processes]
        assert len(ends) == 2, processes
    finally:
        holder.kill()
        holder.wait()
    assert_ended(ends)


def check_for_hours(engine: VllmEngine, now: list[float]) -> None:
    for _ in range(100):
        now[0] += 301
        engine.check_health()


async def test_a_process_that_hangs_is_killed_and_the_engine_asks_to_be_replaced(model_path: Path) -> None:
    others = vllm_processes(psutil.Process())
    small = settings(model_path, kv_cache_memory="64MiB", max_context=1024)
    engine = start(small, VllmSettings(further={"enforce_eager": True}))
    asker, now = Asker(engine), [time.monotonic()]
    engine._hang._clock = lambda: now[0]
    processes = [process for process in vllm_processes(psutil.Process()) if process not in others]
    ends = [os.pidfd_open(process.pid) for process in processes]
    assert len(ends) == 2, processes
    try:
        await asker.ask(max_tokens=4)
        for _ in range(2):  # nothing runs
            now[0] += 1000
            engine.check_health()
        replies = [await started(asker), await started(asker)]
        now[0] += 299
        engine.check_health()
        for process in processes:
            process.suspend()
        with pytest.raises(EngineFailed, match="vLLM hangs: a step has not ended for"):
            check_for_hours(engine, now)
        assert [reply.end.reason for reply in await asyncio.gather(*replies)] == [FinishReason.ABORT] * 2
        with pytest.raises(EngineClosed):
            await asker.ask("Too late.")
        assert_ended(ends)
    finally:
        engine.close()


async def test_when_its_process_dies_requests_end_with_an_error_and_the_engine_says_so(roomy: Asker) -> None:
    engine = roomy.engine
    assert isinstance(engine, VllmEngine)
    replies = [asyncio.create_task(roomy.ask(f"River {n}", max_tokens=400, ignore_eos=True)) for n in range(3)]
    async with asyncio.timeout(60):
        while engine.stats().running < 3:
            await asyncio.sleep(0.01)
    own = vllm_processes(psutil.Process(), "Engine")
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
