"""Explains how to make room for `max_context` if vLLM has too little memory for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

MAX_UTILIZATION = 0.95  # maximum share of a GPU's memory; CUDA and other processes need the rest
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory that vLLM has for keys and values."""

    tokens: int  # the longest context that fits
    token_bytes: float  # estimated bytes of one token on one GPU
    cache_bytes: int | None  # `kv_cache_memory`; None: vLLM chooses the size
    gpus: int  # 0: vLLM runs on the CPU
    tensor_parallel_size: int
    gpu_bytes: int  # memory of one GPU
    utilization: float  # share of `gpu_bytes` that vLLM uses
    is_halvable: bool  # whether the cache can use fp8 and then needs half of the memory


def too_small(memory: KvMemory, context: int) -> str:
    """Explains that a context of `context` tokens does not fit, with a change that makes room for it."""
    return (
        f"the memory for keys and values holds {memory.tokens} of the {context} tokens of max_context: "
        f"set {_change(memory, context)}, or max_context to {memory.tokens}"
    )


def _change(memory: KvMemory, context: int) -> str:
    factor = context / memory.tokens
    if memory.cache_bytes is not None or not memory.gpus:
        size = context * memory.token_bytes if memory.cache_bytes is None else memory.cache_bytes * factor
        return f"kv_cache_memory to {ceil(size / _MIB)}MiB"
    more = (context - memory.tokens) * memory.token_bytes / memory.gpu_bytes
    if (utilization := ceil((memory.utilization + more) * 100) / 100) <= MAX_UTILIZATION:
        return f"vllm.gpu_memory_utilization to {utilization:g}"
    if memory.is_halvable and factor <= 2:
        return "vllm.kv_cache_dtype to fp8"
    times = 2
    # This may be more GPUs than necessary: additional GPUs also divide the weights, which leaves more room on each GPU.
    while times < factor:
        times *= 2
    return f"vllm.tensor_parallel_size to {memory.tensor_parallel_size * times} and num_gpus to {memory.gpus * times}"
