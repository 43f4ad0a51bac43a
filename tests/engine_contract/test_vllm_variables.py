"""Tests that each variable which the project sets for vLLM exists: an unknown one would have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: `make test-vllm`")

from vllm import envs

ROOT = Path(__file__).parents[2]
FOLDERS = ("serve_app", "deployments", "cluster", "bench", "docs")
VARIABLE = re.compile(r"(?<![A-Z_])(?:VLLM|FLASHINFER|TRITON|TORCHINDUCTOR)_[A-Z0-9_]+\b")
#: Where the sources of a library read its variables.
LIBRARIES = {"FLASHINFER": "flashinfer", "TRITON": "triton", "TORCHINDUCTOR": "torch._inductor"}


def texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size < 2**20:
            yield path.read_text(errors="ignore")


def named() -> set[str]:
    own = [text for folder in FOLDERS for text in texts(ROOT / folder)]
    return {name for text in [*own, (ROOT / "config.yaml").read_text()] for name in VARIABLE.findall(text)}


def reads(library: str, names: set[str]) -> set[str]:
    """The names that occur in the sources of a library; all of them if it is not installed, as on a CPU."""
    try:
        spec = find_spec(library)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return names
    folder = Path(next(iter(spec.submodule_search_locations)))
    left = set(names)
    for path in folder.rglob("*.py"):
        if left:
            text = path.read_text(errors="ignore")
            left = {name for name in left if name not in text}
    return names - left


def test_every_variable_that_is_set_for_vllm_exists() -> None:
    names = named()
    assert {"VLLM_CACHE_ROOT", "VLLM_ENGINE_READY_TIMEOUT_S", "TRITON_CACHE_DIR"} <= names
    unknown = {name for name in names if name.startswith("VLLM_")} - {*envs.environment_variables}
    for prefix, library in LIBRARIES.items():
        of_library = {name for name in names if name.startswith(f"{prefix}_")}
        unknown |= of_library - reads(library, of_library)
    assert not unknown
