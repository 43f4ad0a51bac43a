"""Measures our engine on one GPU: step time compared with its floor, and throughput compared with transformers'.

The floor is the lowest possible time of a step. In this time, all weights and the sequences' K and V are read once from
the card's memory, at the speed of a copy in the same run. transformers runs `generate_batch` with CUDA graphs on the
same weights, prompts and lengths. Start-up times are not included.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.gpu_check import models
from bench.gpu_check.machine import bandwidth
from bench.gpu_check.models import PROMPT, generate
from bench.gpu_check.part import Options, Report
from bench.gpu_check.steps import measure_steps
from serve_app.engine.models.choose_runner import create_runner

SEQUENCES = 64
LENGTH = 256  # tokens of a reply


@dataclass(frozen=True)
class Load:
    """The number of sequences and the tokens of each reply."""

    sequences: int = SEQUENCES
    length: int = LENGTH


@dataclass(frozen=True)
class Result:
    """One shape's figures."""

    parameters: int
    bandwidth_gb_s: float
    floor_ms: float  # minimum time of a step at batch 1, by the memory bandwidth
    step_ms: float  # time of a step at batch 1, measured through the whole engine
    floor_share: float
    tokens_s: float  # output tokens per second of all sequences; the time includes their prompts


def run(options: Options, report: Report) -> None:
    """Measures our engine with each shape. transformers comes last, so that its failure cannot affect our figures."""
    device = torch.device(options.device)
    load = Load() if options.on_gpu else Load(4, 8)
    report.add(sequences=load.sequences, reply_tokens=load.length, prompt_tokens=PROMPT, dtype=options.dtype)
    for shape in options.shapes:
        report.doing(f"{shape}: loading")
        model = models.make_model(shape, device, getattr(torch, options.dtype))
        settings = models.engine_settings(options.dtype, kv_cache_memory=models.kv_cache_memory(options))
        figures, runner = measure(model, settings, load, lambda text, shape=shape: report.doing(f"{shape}: {text}"))
        report.add(shapes={shape: asdict(figures)})
        steps = {}
        for count in (1, load.sequences):
            report.doing(f"{shape}: the parts of a step with {count} sequences")
            try:
                steps[str(count)] = measure_steps(runner, settings, count, device)
            except Exception as error:  # without a working profiler, still report the throughput
                report.problem(f"{shape}: the parts of a step: {type(error).__name__}: {error}")
            report.add(steps={shape: steps})
        del model, runner
        free(device)
    for shape in options.shapes:
        report.doing(f"{shape}: transformers")
        report.add(transformers={shape: measure_transformers(shape, device, options.dtype, load)})
        free(device)


def free(device: torch.device) -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(model: Any, settings: Any, load: Load, doing: Any = print) -> tuple[Result, Any]:
    """Measures a model. Returns its figures, and the runner that has taken over its weights."""
    asked = models.prompts(model.config.vocab_size, [PROMPT] * load.sequences)
    parameters = sum(p.numel() for p in model.parameters())
    copy = bandwidth(model.device)
    floor = bytes_of_step(model, PROMPT + load.length // 2) / copy
    runner = create_runner(model, settings)
    engine = models.engine_over(runner, settings)
    try:
        doing("warming up")
        generate(engine, asked, 8)
        generate(engine, asked[:1], load.length)
        doing("one sequence")
        # Subtracting a reply of one token removes the time of the prompt.
        step = (generate(engine, asked[:1], load.length) - generate(engine, asked[:1], 1)) / (load.length - 1)
        doing(f"{load.sequences} sequences")
        tokens_s = load.sequences * load.length / generate(engine, asked, load.length)
    finally:
        engine.close()
    return Result(parameters, copy / 1e9, floor * 1e3, step * 1e3, floor / step, tokens_s), runner


def bytes_of_step(model: Any, tokens_cached: int) -> int:
    """Returns the bytes that one decode step must read: each matrix once, one embedding row, and the cached K and V."""
    config, size = model.config, next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens_cached
    return int((weights + cached) * size)


def measure_transformers(shape: str, device: torch.device, dtype: str, load: Load) -> dict[str, Any]:
    """Returns transformers' tokens per second under the same load, or its error."""
    try:
        model = models.make_model(shape, device, getattr(torch, dtype))
        asked = models.prompts(model.config.vocab_size, [PROMPT] * load.sequences)
        generate_by_transformers(model, asked, 8)
        seconds = generate_by_transformers(model, asked, load.length)
        return {"tokens_s": load.sequences * load.length / seconds}
    except Exception as error:  # a failure of the peer is not a failure of the check
        return {"error": f"{type(error).__name__}: {json.dumps(str(error))[:300]}"}


def generate_by_transformers(model: Any, asked: list[list[int]], length: int) -> float:
    """Seconds from the start of the first request to the end of the last, without graph captures and warm-up."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    on_gpu = model.device.type == "cuda"
    batching = ContinuousBatchingConfig(use_cuda_graph=on_gpu, allow_block_sharing=False)
    if not on_gpu:
        batching.max_memory_percent = 0.02  # without a GPU, this is a share of the machine's memory
    generation = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(asked, generation_config=generation, continuous_batching_config=batching)
    short = [r for r in results.values() if len(r.generated_tokens) != length]
    if short or len(results) != len(asked):
        raise RuntimeError(f"{len(asked) - len(results) + len(short)} requests did not finish: {short[:1]}")
    return max(r.lifespan[1] for r in results.values()) - min(r.lifespan[0] for r in results.values())
