"""The machine, its libraries, and how fast it reads memory: `python -m bench.harness.machine` prints them as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Libraries choose their matrix kernels by these instructions.
FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
LIBRARIES = ("torch", "transformers", "ray", "tokenizers", "numpy")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, instruction set, versions."""
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "family": f"family {_cpuinfo('cpu family')}, model {_cpuinfo('model')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "flags": [flag for flag in FLAGS if flag in (_cpuinfo("flags") or "").split()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: known for name in LIBRARIES if (known := _version(name)) is not None},
    }


def read_bandwidth(size: int = 2**29, rounds: int = 8) -> float:
    """Bytes per second at which all cores together read memory: the fastest of several sums over an array.

    `size` is in bytes and far above any cache.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    values = torch.ones(size // 4, dtype=torch.float32)
    fastest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        values.sum()
        fastest = min(fastest, time.perf_counter() - began)
    return size / fastest


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps({**describe(), "read_bytes_per_s": read_bandwidth()}))
