"""One engine with the tiny model for all tests of a replica on a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

from serve_app.contracts.books import Settlement
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from serve_app.engine.grammar import compiler
from serve_app.model.bundled import bundled_cache_dir
from serve_app.model.replica import Replica


async def no_orphans(settlements: list[Settlement]) -> NoReturn:
    raise AssertionError(f"settled by the replica: {settlements}")


@pytest.fixture(scope="session")
def engine(tiny_path: Path, model_home: Path) -> Iterator[Engine]:
    """In int8, as on a CPU by default."""
    settings = EngineSettings(
        model=str(tiny_path), dtype="int8", kv_cache_memory="64MiB", cache_dir=str(bundled_cache_dir(model_home))
    )
    with mock.patch.object(compiler, "_REST", 0.0):  # else each new grammar waits for the account's last one
        made = Engine.from_settings(settings)
    yield made
    made.close()


@pytest.fixture
def replica(engine: Engine) -> Replica:
    return Replica(engine, no_orphans)
