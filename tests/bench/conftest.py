"""The tests of benchmarks and of what sends their load are for a release, but for those of `EVERY_DAY`."""

from __future__ import annotations

from pathlib import Path

import pytest

EVERY_DAY = {"test_imports.py", "test_gpu_check.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in EVERY_DAY:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)
