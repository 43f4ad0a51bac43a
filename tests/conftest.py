"""Fixtures of all tests: a hypothesis profile, the bundled model and a tiny one, each loaded once in a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.tiny_model import ensure_tiny_model

if TYPE_CHECKING:  # most tests need no model and do not wait for these imports
    from serve_app.engine.engine import Engine
    from serve_app.engine.loading.loader import LoadedModel

pytest_plugins = ["tests.durations"]

# Examples are the same in every run, and a busy machine is no failure.
settings.register_profile("serve-app", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("serve-app")


@pytest.fixture(scope="session")
def model_home() -> Path:
    """The folder that keeps the bundled model between runs."""
    return Path(os.environ.get("SERVE_APP_TEST_HOME", Path(__file__).parents[1] / ".serve-app" / "test"))


@pytest.fixture(scope="session")
def model_path(model_home: Path) -> Path:
    from serve_app.model.bundled import ensure_bundled_model

    return ensure_bundled_model(model_home, print)


@pytest.fixture(scope="session")
def bundled_tokenizer(model_path: Path) -> Any:
    """The bundled model's, without its weights."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def loaded(model_path: Path) -> LoadedModel:
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.loading.loader import load

    return load(EngineSettings(model=str(model_path), kv_cache_memory="64MiB"))


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Any:
    """The same weights, left to transformers' own generation."""
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.loading.loader import load

    return load(EngineSettings(model=str(model_path), kv_cache_memory="64MiB")).model


@pytest.fixture(scope="session")
def tiny_path(model_path: Path) -> Path:
    """The folder of a tiny random model with the bundled model's tokenizer."""
    return ensure_tiny_model(model_path)


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.loading.loader import load

    return load(EngineSettings(model=str(tiny_path), kv_cache_memory="64MiB"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_path: Path) -> Any:
    """The tiny model's weights, left to transformers' own generation."""
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.loading.loader import load

    return load(EngineSettings(model=str(tiny_path), kv_cache_memory="64MiB")).model


@contextmanager
def _engines(model: LoadedModel, path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines over one copy of the weights; one at a time, since a runner changes its model."""
    from serve_app.engine.chat import ChatRenderer
    from serve_app.engine.config import EngineSettings
    from serve_app.engine.engine import Engine
    from serve_app.engine.models.transformers_runner import TransformersRunner
    from serve_app.engine.text.detokenizer import Vocabulary

    engines: list[Engine] = []

    def make(**settings: object) -> Engine:
        for engine in engines:
            engine.close()
        chosen = EngineSettings(model=str(path), **{"kv_cache_memory": "256MiB", **settings})  # type: ignore[arg-type]
        runner = TransformersRunner(model.model, chosen)
        chat = ChatRenderer(model.tokenizer, chosen.max_context)
        engines.append(Engine(runner, Vocabulary(model.tokenizer), model.eos_token_ids, chosen, chat=chat))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_engine(tiny: LoadedModel, tiny_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines of the tiny model, one at a time."""
    with _engines(tiny, tiny_path) as make:
        yield make


@pytest.fixture
def make_bundled_engine(loaded: LoadedModel, model_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines of the bundled model, one at a time, for tests of what a reply says."""
    with _engines(loaded, model_path) as make:
        yield make
