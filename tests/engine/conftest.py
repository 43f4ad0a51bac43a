"""The real bundled model, fetched and converted once for all suites, and engines that are closed after a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.bundled import ensure_bundled_model
from serve_app.engine import ChatRenderer, Engine, EngineSettings
from serve_app.engine.loading.loader import LoadedModel, load
from serve_app.engine.models.runner import ModelRunner
from serve_app.engine.sampling.detokenizer import Vocabulary


@pytest.fixture(scope="session")
def model_path() -> Path:
    root = Path(__file__).resolve().parents[2]
    return ensure_bundled_model(Path(os.environ.get("SERVE_APP_TEST_HOME", root / ".serve-app" / "test")), print)


@pytest.fixture(scope="session")
def loaded(model_path: Path) -> LoadedModel:
    return load(EngineSettings(model=str(model_path), kv_cache_memory="64MiB"))


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Any:
    """The same weights, left to transformers' own generation."""
    return load(EngineSettings(model=str(model_path), kv_cache_memory="64MiB")).model


@pytest.fixture
def make_engine(loaded: LoadedModel, model_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over one copy of the weights; one at a time, since a runner changes its model."""
    engines: list[Engine] = []

    def make(**settings: object) -> Engine:
        for engine in engines:
            engine.close()
        chosen = EngineSettings(model=str(model_path), **{"kv_cache_memory": "256MiB", **settings})  # type: ignore[arg-type]
        runner = ModelRunner(loaded.model, chosen)
        chat = ChatRenderer(loaded.tokenizer, chosen.max_context)
        engines.append(Engine(runner, Vocabulary(loaded.tokenizer), loaded.eos_token_ids, chosen, chat=chat))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
