from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.engine.port import EnginePort

from .replies import Asker

MAX_RUNNING, MAX_WAITING = 4, 8
KV_CACHE = "32MiB"  # 728 tokens of the bundled model: four replies of 220 don't fit


def start_native(home: Path) -> EnginePort:
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.engine import Engine
    from serve_app.model.bundled import bundled_cache_dir, prepare_bundled_model

    settings = EngineSettings(
        model=str(prepare_bundled_model(home, print)),
        dtype="int8",
        cache_dir=str(bundled_cache_dir(home)),
        kv_cache_memory=KV_CACHE,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
    )
    return Engine.from_settings(settings)


STARTS: dict[str, Callable[[Path], EnginePort]] = {"native": start_native}


@pytest.fixture(scope="session", params=STARTS)
def engine(request: pytest.FixtureRequest, model_home: Path) -> Iterator[EnginePort]:
    started = STARTS[request.param](model_home)
    yield started
    started.close()


@pytest.fixture
def asker(engine: EnginePort) -> Asker:
    return Asker(engine)
