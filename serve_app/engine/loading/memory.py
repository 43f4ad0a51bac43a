"""Whether a model fits into memory, found out before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.checkpoint import StoredTensor

_GIB = 2**30

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes


def weight_bytes(tensors: Iterable[StoredTensor], dtype: str) -> int:
    """Bytes of a model's weights once they are loaded as `dtype`.

    As `int8`, matrices take a byte for each weight; the embedding is float32, and if it serves as the output matrix
    too, there is an int8 copy of it.
    """
    stored = list(tensors)
    if dtype != "int8":
        return sum(tensor.elements for tensor in stored) * _ITEM[dtype]
    embeddings = [tensor for tensor in stored if "embed_tokens" in tensor.name]
    tied = not any(tensor.name.endswith("lm_head.weight") for tensor in stored)
    copies = sum((_ITEM["float32"] + tied) * tensor.elements for tensor in embeddings)
    return copies + sum(tensor.elements for tensor in stored if tensor not in embeddings)


def check(name: str, tensors: Iterable[StoredTensor], settings: EngineSettings, available: int | None = None) -> None:
    """Refuse a model whose weights and KV cache can't fit into the one device that they are placed on.

    `available` is in bytes, by default what the device has free now. Models spread over several devices are not
    checked: accelerate plans them against each device's memory.

    Raises:
        ModelError: what is there, what is needed, and which settings to change.
    """
    if not isinstance(settings.device_map, str):
        return
    if settings.device_map == "cpu":
        there, where = available_memory() if available is None else available, "memory"
        remedy = "lower kv_cache_memory" + ("" if settings.dtype == "int8" else ", set dtype: int8")
    elif settings.device_map.startswith("cuda"):
        there = cuda_memory(settings.device_map) if available is None else available
        where = f"memory on {settings.device_map}"
        remedy = "lower kv_cache_memory, set device_map: auto" + ("" if settings.dtype != "float32" else " or bfloat16")
    else:
        return
    weights = weight_bytes(tensors, settings.dtype)
    needed = weights + settings.kv_cache_memory
    if needed > there:
        raise ModelError(
            f"Too little {where}: {there / _GIB:.1f} GiB are available, {needed / _GIB:.1f} GiB are needed "
            f"({weights / _GIB:.1f} for the weights of {name} as {settings.dtype}, "
            f"{settings.kv_cache_memory / _GIB:.1f} for kv_cache_memory): {remedy} or choose a smaller model."
        )


def require(needed: int, task: str, remedy: str, available: int | None = None) -> None:
    """Refuse a task that needs more bytes of memory than there are.

    Raises:
        ModelError: what is there, what is needed, and the remedy.
    """
    there = available_memory() if available is None else available
    if needed > there:
        raise ModelError(
            f"Too little memory: {there / _GIB:.1f} GiB are available, {task} needs {needed / _GIB:.1f} GiB: {remedy}."
        )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: of the machine, or of its container's limit if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached files count as used but give way, as in Kubernetes' own measure of a working set.
        return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return free


def cuda_memory(device: str) -> int:
    """Free bytes of a CUDA device, `cuda` or `cuda:N`, which must exist."""
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])
