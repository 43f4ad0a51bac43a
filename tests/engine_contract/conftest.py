from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from serve_app.engine.port import EnginePort

from .replies import Asker

MAX_RUNNING, MAX_WAITING = 4, 8
# 364 and 728 tokens of the bundled model; vLLM's blocks are large.
KV_CACHE = {"native": "8MiB", "vllm": "32MiB"}
VLLM_CONTEXT = 512  # what fits


def start_native(home: Path) -> EnginePort:
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.engine import Engine
    from serve_app.model.bundled import bundled_cache_dir, prepare_bundled_model

    settings = EngineSettings(
        model=str(prepare_bundled_model(home, print)),
        dtype="int8",
        cache_dir=str(bundled_cache_dir(home)),
        kv_cache_memory=KV_CACHE["native"],
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
    )
    return Engine.from_settings(settings)


def start_vllm(home: Path) -> EnginePort:
    import torch

    from serve_app.engine.config import EngineSettings
    from serve_app.engine.vllm_adapter.start import start
    from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings
    from serve_app.model.bundled import ensure_bundled_model

    settings = EngineSettings(
        model=str(ensure_bundled_model(home, print)),
        dtype="float32",
        kv_cache_memory=KV_CACHE["vllm"],
        max_context=VLLM_CONTEXT,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
    )
    # Compiling takes two minutes, and changes nothing of what is tested here.
    options = VllmSettings(further={"enforce_eager": True})
    return start(settings, options, gpus=int(torch.cuda.is_available()), progress=print)


# vLLM has an environment of its own: `make test-vllm`.
STARTS: dict[str, Callable[[Path], EnginePort]] = (
    {"native": start_native} if find_spec("vllm") is None else {"vllm": start_vllm}
)


@pytest.fixture(scope="session", params=STARTS)
def engine(request: pytest.FixtureRequest, model_home: Path) -> Iterator[EnginePort]:
    started = STARTS[request.param](model_home)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _only_what_is_promised(request: pytest.FixtureRequest, engine: EnginePort) -> None:
    marker = request.node.get_closest_marker("promise")
    if marker is not None and marker.args[0] in engine.lacks:
        pytest.skip(f"not promised by this engine: {marker.args[0]}")


@pytest.fixture
def asker(engine: EnginePort) -> Asker:
    return Asker(engine)
