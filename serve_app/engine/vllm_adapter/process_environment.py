"""Environment variables of a process that starts vLLM. vLLM reads some when it is imported, so set them before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

READY_S = 7200  # vLLM's own limit of 600 s is too short to read the weights of a large model from a shared disk


def variables(cache: Path) -> Mapping[str, str]:
    """The variables. With them, vLLM and its libraries keep what they compile in the folder `cache`."""
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": cache / "torchinductor",
        "TRITON_CACHE_DIR": cache / "triton",
        "FLASHINFER_WORKSPACE_BASE": cache,  # FlashInfer appends .cache/flashinfer
        "CUDA_CACHE_PATH": cache / "cuda",
    }
    return {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(READY_S),
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM copies its own variables to its workers on other nodes, and others only if they are listed here.
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(folders),
        **{name: str(folder) for name, folder in folders.items()},
    }


def prepare(cache: Path) -> None:
    """Set the variables that are not set yet. Values from `runtime_env.env_vars` and from the image stay."""
    for name, value in variables(cache).items():
        os.environ.setdefault(name, value)
