"""One service for all service tests but those of another configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.collector import Collector
from tests.service.harness import Service
from tests.service.started import started

STRIPE_SECRET = "whsec_of_the_tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that kill parts of the shared service come after those that do not: these count from its start.

    Then comes its end, and last what has a service of its own under a later name.
    """
    last = Path(__file__).with_name("test_the_end.py")

    def turn(item: pytest.Item) -> int:
        if item.path.parent == last.parent and item.path.name >= last.name:
            return 2
        return int("breakable" in getattr(item, "fixturenames", ()))

    items.sort(key=turn)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `service`."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def service(model_path: Path, collector: Collector) -> Iterator[Service]:
    tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "500"}
    stripe = {"SERVE_APP_STRIPE_KEY": "sk_test_none", "SERVE_APP_STRIPE_WEBHOOK_SECRET": STRIPE_SECRET}
    with started(model_path, **tracing, **stripe) as running:
        yield running


@pytest.fixture
def breakable(service: Service) -> Iterator[Service]:
    """The same, for a test that kills parts of it: all of them run again before the next test."""
    yield service
    service.ready()
