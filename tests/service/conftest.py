"""One service for all service tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.collector import Collector
from tests.service.harness import Service
from tests.service.started import started


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `service`."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def service(model_path: Path, collector: Collector) -> Iterator[Service]:
    tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "500"}
    with started(model_path, **tracing) as running:
        yield running
