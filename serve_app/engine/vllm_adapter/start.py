"""Starts vLLM from a backend's settings."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import json
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError, first_line
from serve_app.engine.hang import HangDetector
from serve_app.engine.loading import checkpoint, loader
from serve_app.engine.sampling.ranges import MAX_TOP_LOGPROBS
from serve_app.engine.scheduling.fair_gate import FairGate
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.seen_prefixes import SeenPrefixes
from serve_app.engine.vllm_adapter import context_memory
from serve_app.engine.vllm_adapter.context_memory import KvMemory
from serve_app.engine.vllm_adapter.vllm_engine import Limits, VllmEngine
from serve_app.engine.vllm_adapter.vllm_processes import bind_to_parents
from serve_app.engine.vllm_adapter.vllm_settings import SPARE, VllmSettings, max_sequences, problem
from serve_app.engine.vllm_adapter.vllm_stats import StepCounts

logger = logging.getLogger(__name__)

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM allows for max_lora_rank


def start(
    settings: EngineSettings,
    options: VllmSettings,
    gpus: float = 0,
    on_nodes: bool = False,
    progress: Callable[[str], None] = logger.info,
) -> VllmEngine:
    """Load the model of the settings with vLLM and start an engine on it; `progress` receives lines about the loading.

    The process has `gpus` GPUs. With `on_nodes`, it instead uses GPUs that Ray has reserved in a placement group, on
    one or more nodes.

    Raises:
        ModelError: no such model, an argument that vLLM does not know, or vLLM did not start.
    """
    if (wrong := problem(settings, options) or _wrong_gpus(options, gpus, on_nodes)) is not None:
        raise ModelError(f"{wrong}.")
    source = loader.locate(settings, progress)
    tokenizer = loader.load_tokenizer(source)
    dtype = settings.dtype if "dtype" in settings.model_fields_set else "auto"
    fingerprint = checkpoint.fingerprint(source.folder, _identity(options, dtype))
    loader.check_fingerprint(source, settings, fingerprint)
    arguments = engine_arguments(settings, options, source.folder, dtype) | {"served_model_name": source.name}
    if on_nodes:
        arguments["distributed_executor_backend"] = "ray"
    began = time.monotonic()
    progress(f"Starting vLLM {vllm.__version__} on {source.name}; this may take some minutes")
    counts = StepCounts()
    hang = HangDetector(settings.step_limit_s(on_cpu=current_platform.is_cpu()))
    others = set(multiprocessing.active_children())
    loop, thread = _running_loop()
    llm = None
    try:
        llm, native_context = asyncio.run_coroutine_threadsafe(_start(arguments, counts), loop).result()
        max_context = min(native_context, settings.max_context)
        if llm.model_config.max_model_len < max_context:
            memory = _kv_memory(llm, settings, 0 if current_platform.is_cpu() else options.gpus)
            raise ModelError(f"{source.name}: {context_memory.too_small(memory, max_context)}.")
        vocab_size = llm.model_config.get_vocab_size()
        eos = loader.eos_token_ids(_generation_config(source.folder), tokenizer)
        scheduler = llm.vllm_config.scheduler_config
        spare = max(1, scheduler.max_num_seqs // (SPARE + 1))
        limits = Limits(
            max_context=max_context,
            max_output=settings.max_output,
            max_running=scheduler.max_num_seqs - spare,
            vocab_size=vocab_size,
            kv_blocks=llm.vllm_config.cache_config.num_gpu_blocks or 0,
            eos_token_ids=frozenset(token for token in eos if token < vocab_size),
        )
        gate = FairGate(
            FairQueue(settings.fair_prompt_weight, settings.fair_output_weight),
            SeenPrefixes(_cached_tokens(llm.vllm_config.cache_config)),
            max_running=limits.max_running,
            max_waiting=settings.max_waiting,
            spare=spare,
            step_tokens=scheduler.max_num_batched_tokens,
            # The steps that vLLM has already scheduled when an output arrives, the next one, and one as a reserve.
            steps_ahead=llm.vllm_config.max_concurrent_batches + 2,
        )
        progress(
            f"vLLM has started in {time.monotonic() - began:.0f} s: a context of {max_context} tokens, "
            f"{limits.max_running} running requests, {scheduler.max_num_batched_tokens} tokens per step"
        )
        return VllmEngine(
            llm,
            loop,
            thread,
            tokenizer,
            gate,
            counts,
            limits,
            hang=hang,
            processes=[child for child in multiprocessing.active_children() if child not in others],
            max_adapters=options.max_adapters,
            fingerprint=fingerprint,
        )
    except BaseException as error:
        if llm is not None:
            loop.call_soon_threadsafe(llm.shutdown)
        loop.call_soon_threadsafe(loop.stop)
        if isinstance(error, Exception) and not isinstance(error, ModelError):
            raise ModelError(
                f"vLLM did not start with {source.name}: {first_line(error)}. See vLLM's lines in the replica's log."
            ) from error
        raise


def _cached_tokens(cache: Any) -> int:
    """Maximum number of tokens in the prefix cache; 0 if vLLM has none."""
    return int((cache.num_gpu_blocks or 0) * cache.block_size) if cache.enable_prefix_caching else 0


def _identity(options: VllmSettings, dtype: str) -> str:
    """Everything that affects replies apart from the model's files."""
    parts = [vllm.__version__, dtype, str(options.quantization), json.dumps(options.further, sort_keys=True)]
    return "\n".join(["vllm", *parts])


def engine_arguments(settings: EngineSettings, options: VllmSettings, folder: Path, dtype: str) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs. Raises ModelError for an argument that vLLM does not know."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in options.further:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"do you mean {near[0]}?" if near else "see the engine arguments in vLLM's documentation."
            raise ModelError(f"vllm.{name}: vLLM {vllm.__version__} has no such argument; {hint}")
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        # vLLM chooses the longest context that fits in memory, up to the model's own; `start` checks it.
        "max_model_len": -1,
        "max_num_seqs": max_sequences(settings),
        "scheduling_policy": "priority",  # the gate sets the priorities
        "enable_prefix_caching": settings.prefix_reuse,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization,
        "structured_outputs_config": {"backend": "guidance"},
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        # The service sets a request's sampling defaults, not the model's generation_config.json.
        "generation_config": "vllm",
        "enable_log_requests": False,
    }
    if "kv_cache_memory" in settings.model_fields_set and settings.kv_cache_memory != "auto":
        chosen["kv_cache_memory_bytes"] = settings.kv_cache_memory
    if options.max_loras:
        chosen |= {
            "enable_lora": True,
            "max_loras": options.max_loras,
            "max_cpu_loras": options.max_adapters,
            "max_lora_rank": next(rank for rank in _RANKS if rank >= options.max_lora_rank),
        }
    return chosen | options.further


def _wrong_gpus(options: VllmSettings, gpus: float, on_nodes: bool) -> str | None:
    """A problem with this process's GPUs, and the remedy; None if there is none."""
    if on_nodes:
        return None  # vLLM itself checks the size of the placement group
    on_cpu = current_platform.is_cpu()
    if gpus and on_cpu:
        return (
            f"the replica has {gpus:g} GPU (num_gpus), but this is vLLM's CPU build: install the CUDA build "
            "(python -m serve_app.launch.vllm_environment --device cuda), or set num_gpus to 0"
        )
    if gpus and not torch.cuda.is_available():
        return (
            f"the replica has {gpus:g} GPU (num_gpus), but torch finds no CUDA device: check the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    if not on_cpu and gpus != options.gpus:
        return (
            f"vllm.tensor_parallel_size × pipeline_parallel_size is {options.gpus}, but the replica has {gpus:g} GPUs: "
            f"set num_gpus to {options.gpus} in ray_actor_options"
        )
    return None


async def _start(arguments: dict[str, Any], counts: StepCounts) -> tuple[AsyncLLM, int]:
    """Start vLLM; return the engine, and the model's own context in tokens."""
    # vLLM derives its defaults for tokens per step and for sequences from the usage: here, an API server.
    usage = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs(**arguments).create_engine_config(usage)
    native_context = config.model_config.max_model_len  # before vLLM lowers it to what fits
    bind_to_parents()
    llm = AsyncLLM.from_vllm_config(config, usage_context=usage, stat_loggers=[lambda config, index: counts])
    return llm, native_context


def _kv_memory(llm: AsyncLLM, settings: EngineSettings, gpus: int) -> KvMemory:
    model, parallel, cache = llm.model_config, llm.vllm_config.parallel_config, llm.vllm_config.cache_config
    is_plain = cache.cache_dtype == "auto"
    numbers = model.get_num_kv_heads(parallel) * model.get_head_size() * (1 if model.use_mla else 2)
    return KvMemory(
        tokens=model.max_model_len,
        token_bytes=model.get_num_layers(parallel) * numbers * (model.dtype.itemsize if is_plain else 1),
        cache_bytes=cache.kv_cache_memory_bytes if "kv_cache_memory" in settings.model_fields_set else None,
        gpus=gpus,
        tensor_parallel_size=parallel.tensor_parallel_size,
        gpu_bytes=current_platform.get_device_total_memory(),
        utilization=cache.gpu_memory_utilization,
        is_halvable=is_plain and current_platform.has_device_capability(89),
    )


def _running_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()

    async def cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def run() -> None:
        loop.run_forever()
        loop.run_until_complete(cancel_all())
        loop.close()

    thread = threading.Thread(target=run, name="vllm", daemon=True)
    thread.start()
    return loop, thread


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(folder)
    return None
