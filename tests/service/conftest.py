"""One service for all service tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import Service
from tests.service.started import started


@pytest.fixture(scope="session")
def service(model_path: Path) -> Iterator[Service]:
    with started(model_path) as running:
        yield running
