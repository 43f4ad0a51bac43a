"""Decoding on one GPU: share of the memory-bandwidth floor at batch 1, throughput at 64 sequences beside transformers.

    python -m bench.engine_gpu [--shape 1b --shape 7b] [--json FILE]

Weights are random and made on the spot. The floor of a step is the time that the card's memory takes to hand over
all weights once and the K and V of the sequences, at the speed of a copy measured in the same run. The peer is
`generate_batch` with CUDA graphs, over the same weights, prompts and lengths; its start-up does not count, nor ours.
The engine itself has no CUDA graphs: on GPUs it is correct, not fast.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from serve_app.contracts.generation import Finished, SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.models.choose_runner import create_runner
from serve_app.engine.request import GenerationRequest
from serve_app.engine.text.detokenizer import Vocabulary, bytes_of_unicode

PROMPT = 160
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One shape's figures."""

    shape: str
    parameters: int
    machine: str
    bandwidth_gb_s: float
    floor_ms: float  # of a step at batch 1
    step_ms: float  # as measured through the whole engine
    floor_share: float
    ours_tokens_s: float  # 64 sequences, prompts included
    transformers_tokens_s: float | None
    transformers_error: str | None


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(max_position_embeddings=8192, **ids, **SHAPES[shape])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def bytes_of_step(model: Any, tokens_cached: int) -> int:
    """Returns the bytes that one decode step must read: each matrix once, one embedding row, and the cached K and V."""
    config, size = model.config, next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens_cached
    return int((weights + cached) * size)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def running(model: Any, dtype: str) -> Iterator[Engine]:
    """The engine over a model, whose weights it takes over."""
    settings = EngineSettings(
        model="random",
        dtype=dtype,  # type: ignore[arg-type]
        kv_cache_memory="1GiB" if model.device.type == "cpu" else "16GiB",
        max_running=64,
        max_context=2048,
        prefill_chunk=4096,
        prefill_chunk_busy=2048,
        prefix_reuse=False,
        speculation_rows=0,  # random weights soon repeat themselves, which guesses would profit from
    )
    core = Tokenizer(models.BPE(vocab=bytes_of_unicode(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=core))
    engine = Engine(create_runner(model, settings), vocabulary, frozenset(), settings)
    try:
        yield engine
    finally:
        engine.close()


def generate(engine: Engine, prompts: list[list[int]], length: int) -> float:
    """Seconds until every prompt has its `length` tokens."""
    params = SamplingParams(max_tokens=length, temperature=0.0)
    started = time.perf_counter()

    async def reply(number: int, prompt: list[int]) -> None:
        async for event in engine.generate(GenerationRequest(f"{started}-{number}", tuple(prompt), params)):
            if isinstance(event, Finished) and event.completion_tokens != length:
                raise RuntimeError(f"a reply of another length than {length}: {event}")

    async def all_replies() -> None:
        await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(prompts)))

    asyncio.run(all_replies())
    return time.perf_counter() - started


def generate_by_transformers(model: Any, prompts: list[list[int]], length: int) -> float:
    """Seconds from the first request taken up to the last one finished; captures and warm-up come before."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            use_cuda_graph=model.device.type == "cuda", allow_block_sharing=False
        ),
    )
    short = [r for r in results.values() if len(r.generated_tokens) != length]
    if short or len(results) != len(prompts):
        raise RuntimeError(f"{len(prompts) - len(results) + len(short)} requests did not finish: {short[:1]}")
    return max(r.lifespan[1] for r in results.values()) - min(r.lifespan[0] for r in results.values())


def measure(shape: str, device: torch.device, *, length: int = 256, sequences: int = 64, peer: bool = True) -> Result:
    """All figures of one shape; the peer first, since the engine takes the model over."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    model = make_model(shape, device, getattr(torch, dtype))
    vocab = model.config.vocab_size
    prompts = torch.randint(0, vocab, (sequences, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    bandwidth = measure_bandwidth(device, 2**30 if device.type == "cuda" else 2**26)
    floor = bytes_of_step(model, PROMPT + length // 2) / bandwidth
    parameters = sum(p.numel() for p in model.parameters())
    theirs, error = None, None
    try:
        if peer:
            generate_by_transformers(model, prompts, 8)
            theirs = sequences * length / generate_by_transformers(model, prompts, length)
    except Exception as failure:  # the peer's own troubles must not hide our figures
        error = f"{type(failure).__name__}: {failure}"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with running(model, dtype) as engine:
        generate(engine, prompts, 8)
        generate(engine, prompts[:1], length)
        # The prompt's own time cancels out.
        step = (generate(engine, prompts[:1], length) - generate(engine, prompts[:1], 1)) / (length - 1)
        ours = sequences * length / generate(engine, prompts, length)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Result(
        shape, parameters, machine, bandwidth / 1e9, floor * 1e3, step * 1e3, floor / step, ours, theirs, error
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: 1b and 7b")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--on-cpu", action="store_true", help="try the benchmark itself, without a GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.on_cpu:
        raise SystemExit("no CUDA device")
    device = torch.device("cpu" if options.on_cpu else "cuda:0")
    results = []
    print("| shape | machine | floor ms | step ms | share | tok/s at 64 | transformers |")
    print("|---|---|---|---|---|---|---|")
    for shape in options.shape or ("1b", "7b"):
        result = measure(shape, device, **({"length": 16, "sequences": 8} if options.on_cpu else {}))
        results.append(asdict(result))
        theirs = f"{result.transformers_tokens_s:.0f}" if result.transformers_tokens_s else result.transformers_error
        print(
            f"| {shape} | {result.machine} | {result.floor_ms:.3f} | {result.step_ms:.3f} | {result.floor_share:.0%} "
            f"| {result.ours_tokens_s:.0f} | {theirs} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
