"""Tests of the options that the builders of applications derive from a backend's settings."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private import build_app

from deployments.apps import backend, model


def max_calls(application: Any) -> int:
    built = build_app.build_app(application, name="a", make_deployment_handle=lambda *_: None)
    [deployment] = [one for one in built.deployments if one.name == "Model"]
    limit: int = deployment.max_ongoing_requests
    return limit


@pytest.mark.parametrize(
    ("args", "calls"),
    [
        ({}, 32 + 96),
        ({"max_running": 200, "max_waiting": 50}, 250),
        ({"engine": "vllm"}, 1024 + 96),
        ({"engine": "vllm", "max_running": 64, "max_waiting": 64}, 64 + 8 + 64),
    ],
    ids=str,
)
def test_a_replica_takes_the_calls_that_its_engine_may_run_or_queue(args: dict[str, Any], calls: int) -> None:
    """Others wait in Serve's routers, where accounts don't take turns."""
    args = {"model": "m", **args}
    assert max_calls(model(args)) == calls
    assert max_calls(backend(args, {}, "1")) == calls
    assert max_calls(backend(args, {"max_ongoing_requests": 7}, "1")) == 7
