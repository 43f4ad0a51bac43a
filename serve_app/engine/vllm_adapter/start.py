"""Starts vLLM from a backend's settings."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError, first_line
from serve_app.engine.loading import checkpoint, hub, loader
from serve_app.engine.sampling.ranges import MAX_TOP_LOGPROBS
from serve_app.engine.scheduling.fair_gate import FairGate
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.engine.scheduling.seen_prefixes import SeenPrefixes
from serve_app.engine.vllm_adapter.vllm_engine import Limits, VllmEngine
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings, problem
from serve_app.engine.vllm_adapter.vllm_stats import StepCounts

logger = logging.getLogger(__name__)

_SPARE = 8  # one additional sequence per this many slots, for tenants that have none running


def start(
    settings: EngineSettings,
    options: VllmSettings,
    gpus: float = 0,
    on_nodes: bool = False,
    progress: Callable[[str], None] = logger.info,
) -> VllmEngine:
    """Load the model of the settings with vLLM and start an engine on it; `progress` receives lines about it.

    The process has `gpus` GPUs. With `on_nodes`, Ray has instead reserved GPUs for it in a placement group, on one or
    more nodes.

    Raises:
        ModelError: no such model, an argument that vLLM does not know, or vLLM did not start.
    """
    if (wrong := problem(settings, options) or _wrong_gpus(options, gpus, on_nodes)) is not None:
        raise ModelError(f"{wrong}.")
    source = loader.locate(settings, progress)
    tokenizer = loader.load_tokenizer(source)
    dtype = settings.dtype if "dtype" in settings.model_fields_set else "auto"
    adapters = find_adapters(options.adapters, progress)
    fingerprint = checkpoint.fingerprint(source.folder, _identity(options, dtype, adapters))
    loader.check_fingerprint(source, settings, fingerprint)
    spare = max(1, settings.max_running // _SPARE)
    arguments = engine_arguments(settings, options, source.folder, dtype, settings.max_running + spare)
    if adapters:
        ranks = [rank_of(Path(adapter.lora_path)) for adapter in adapters.values()]
        arguments |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": max(ranks)}
    if on_nodes:
        arguments["distributed_executor_backend"] = "ray"
    began = time.monotonic()
    progress(f"Starting vLLM {vllm.__version__} on {source.name}; this may take some minutes")
    counts = StepCounts()
    loop, thread = _running_loop()
    llm = None
    try:
        llm = asyncio.run_coroutine_threadsafe(_start(arguments, counts), loop).result()
        for adapter in adapters.values():  # now: a failure in the first request's step would end the engine
            progress(f"Loading the adapter {adapter.lora_name}")
            asyncio.run_coroutine_threadsafe(llm.add_lora(adapter), loop).result()
        vocab_size = llm.model_config.get_vocab_size()
        eos = loader.eos_token_ids(_generation_config(source.folder), tokenizer)
        limits = Limits(
            max_context=min(llm.model_config.max_model_len, settings.max_context),
            max_output=settings.max_output,
            vocab_size=vocab_size,
            kv_blocks=llm.vllm_config.cache_config.num_gpu_blocks or 0,
            eos_token_ids=frozenset(token for token in eos if token < vocab_size),
        )
        gate = FairGate(
            FairQueue(settings.fair_prompt_weight, settings.fair_output_weight),
            SeenPrefixes(_cached_tokens(llm.vllm_config.cache_config)),
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            spare=spare,
            step_tokens=llm.vllm_config.scheduler_config.max_num_batched_tokens,
            # Those that vLLM has scheduled when an output arrives, the next one, and one for wrong estimates.
            steps_ahead=llm.vllm_config.max_concurrent_batches + 2,
        )
        progress(f"vLLM has started in {time.monotonic() - began:.0f} s; the context is {limits.max_context} tokens")
        return VllmEngine(
            llm, loop, thread, tokenizer, gate, counts, limits, adapters=adapters, fingerprint=fingerprint
        )
    except BaseException as error:
        if llm is not None:
            loop.call_soon_threadsafe(llm.shutdown)
        loop.call_soon_threadsafe(loop.stop)
        if isinstance(error, Exception):
            raise ModelError(
                f"vLLM did not start with {source.name}: {first_line(error)}. Its own lines in the log say why."
            ) from error
        raise


def find_adapters(paths: Mapping[str, str], progress: Callable[[str], None]) -> dict[str, LoRARequest]:
    """The adapters by name; adapters on the hub are fetched. Raises ModelError if one is missing."""
    found = {}
    for number, (name, path) in enumerate(paths.items(), 1):
        folder = Path(path).expanduser()
        if not folder.exists() and not path.startswith((".", "~", "/")):
            folder = hub.fetch(path, progress)
        rank_of(folder)
        found[name] = LoRARequest(name, number, str(folder.absolute()))
    return found


def rank_of(folder: Path) -> int:
    """The rank of a LoRA adapter. Raises ModelError for a folder without an adapter."""
    try:
        return int(json.loads((folder / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"{folder} is not a LoRA adapter: it has no adapter_config.json with the rank `r`; check vllm.adapters."
        ) from None


def _cached_tokens(cache: Any) -> int:
    """Maximum number of tokens in the prefix cache; 0 if vLLM has none."""
    return int((cache.num_gpu_blocks or 0) * cache.block_size) if cache.enable_prefix_caching else 0


def _identity(options: VllmSettings, dtype: str, adapters: Mapping[str, LoRARequest]) -> str:
    """Everything that affects replies apart from the model's files."""
    parts = [vllm.__version__, dtype, str(options.quantization), json.dumps(options.further, sort_keys=True)]
    for name, adapter in adapters.items():
        for path in sorted(Path(adapter.lora_path).glob("adapter_*")):
            parts.append(f"{name} {path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return "\n".join(["vllm", *parts])


def engine_arguments(
    settings: EngineSettings, options: VllmSettings, folder: Path, dtype: str, max_num_seqs: int
) -> dict[str, Any]:
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
        # vLLM chooses the longest context that fits in memory; the engine uses less if `max_context` is lower.
        "max_model_len": -1,
        "max_num_seqs": max_num_seqs,
        "scheduling_policy": "priority",  # the gate sets the order
        "enable_prefix_caching": settings.prefix_reuse,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization,
        "structured_outputs_config": {"backend": "guidance"},
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        # A request's defaults come from the chat format, not from the model's files.
        "generation_config": "vllm",
        "enable_log_requests": False,
    }
    if "kv_cache_memory" in settings.model_fields_set and settings.kv_cache_memory != "auto":
        chosen["kv_cache_memory_bytes"] = settings.kv_cache_memory
    return chosen | options.further


def _wrong_gpus(options: VllmSettings, gpus: float, on_nodes: bool) -> str | None:
    """A problem with this process's GPUs, and the remedy; None if there is none."""
    if on_nodes:
        return None  # vLLM compares the placement group with its own size
    on_cpu = current_platform.is_cpu()
    if gpus and on_cpu:
        return (
            f"the replica has {gpus:g} GPU (num_gpus), and this is vLLM's CPU build: install the CUDA build "
            "(python -m serve_app.launch.vllm_environment --device cuda), or set num_gpus to 0"
        )
    if gpus and not torch.cuda.is_available():
        return (
            f"the replica has {gpus:g} GPU (num_gpus), and torch finds no CUDA device: check the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    if not on_cpu and gpus != options.gpus:
        return (
            f"vllm.tensor_parallel_size × pipeline_parallel_size is {options.gpus}, and the replica has {gpus:g} GPUs: "
            f"set num_gpus to {options.gpus} in ray_actor_options"
        )
    return None


async def _start(arguments: dict[str, Any], counts: StepCounts) -> AsyncLLM:
    # A forked process cannot use CUDA if its parent has used it, and the replica may have.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda config, index: counts])


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
