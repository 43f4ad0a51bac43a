"""The drill says at once that its nodes can't see a folder that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.drill import network

OUTSIDE = Path("/var/tmp/serve-app")


@pytest.mark.parametrize(
    ("root", "environment", "weights", "named"),
    [
        ("/tmp/checkout", OUTSIDE, OUTSIDE, "checkout is at /tmp/checkout"),
        (OUTSIDE, "/tmp/venv", OUTSIDE, "virtual environment is at /tmp/venv"),
        (OUTSIDE, OUTSIDE, "/tmp/models", "SERVE_APP_TEST_HOME) is at /tmp/models"),
    ],
)
def test_a_folder_below_tmp_is_named_before_anything_starts(
    root: str, environment: str, weights: str, named: str
) -> None:
    problem = network.missing(Path(weights), Path(root), str(environment))
    assert named in problem
    assert "each node's own /tmp hides it: move it out of /tmp" in problem
