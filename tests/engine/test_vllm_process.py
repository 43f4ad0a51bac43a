"""Tests of what surrounds vLLM's start: the variables of its process, and a context that does not fit its memory.

None of them needs vLLM.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import engines
from serve_app.engine.config import EngineSettings
from serve_app.engine.vllm_adapter import process_environment
from serve_app.engine.vllm_adapter.context_memory import KvMemory, too_small
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings

KIB, GIB = 2**10, 2**30
ON_GPU = KvMemory(
    tokens=20_000,
    token_bytes=160 * KIB,
    cache_bytes=None,
    gpus=1,
    tensor_parallel_size=1,
    gpu_bytes=80 * GIB,
    utilization=0.9,
    is_halvable=True,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """An environment in which none of the variables is set."""
    found = {name: value for name, value in os.environ.items() if name not in process_environment.variables(tmp_path)}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_whatever_is_compiled_is_kept_in_the_backends_cache(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The variables are set before vLLM is imported, because it reads some of them then."""
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "serve_app.engine.vllm_adapter.start", None)  # its import fails
    settings = EngineSettings(model="m", cache_dir=str(tmp_path / "volume"))
    with pytest.raises(ImportError):
        engines.ENGINES["vllm"].start(settings, VllmSettings(), 0, False, print)
    kept = {name for name, value in environment.items() if value.startswith(str(tmp_path / "volume"))}
    assert kept >= {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}
    assert int(environment["VLLM_ENGINE_READY_TIMEOUT_S"]) >= 3600


def test_workers_on_other_nodes_get_the_variables_that_vllm_does_not_pass_on(tmp_path: Path) -> None:
    variables = process_environment.variables(tmp_path)
    passed = variables["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")
    assert {*passed} == {name for name in variables if not name.startswith("VLLM_")}


def test_a_variable_of_the_operator_stays(environment: dict[str, str], tmp_path: Path) -> None:
    environment["TRITON_CACHE_DIR"] = "/kernels"
    process_environment.prepare(tmp_path)
    assert environment["TRITON_CACHE_DIR"] == "/kernels"
    assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")


@pytest.mark.parametrize(
    ("memory", "context", "change"),
    [
        (ON_GPU, 40_000, "vllm.gpu_memory_utilization to 0.94"),
        (replace(ON_GPU, token_bytes=320 * KIB), 40_000, "vllm.kv_cache_dtype to fp8"),
        (ON_GPU, 60_000, "vllm.tensor_parallel_size to 4 and num_gpus to 4"),
        (
            replace(ON_GPU, utilization=0.95, is_halvable=False),
            40_000,
            "vllm.tensor_parallel_size to 2 and num_gpus to 2",
        ),
        (
            replace(ON_GPU, gpus=8, tensor_parallel_size=4),
            130_000,
            "vllm.tensor_parallel_size to 32 and num_gpus to 64",
        ),
        (replace(ON_GPU, cache_bytes=3 * GIB), 30_000, "kv_cache_memory to 4608MiB"),
        (replace(ON_GPU, gpus=0, token_bytes=64 * KIB), 32_768, "kv_cache_memory to 2048MiB"),
    ],
)
def test_a_context_that_does_not_fit_is_refused_with_the_smallest_change(
    memory: KvMemory, context: int, change: str
) -> None:
    message = too_small(memory, context)
    assert f"20000 of the {context} tokens" in message
    assert message.endswith(f"set {change}, or max_context to 20000")
