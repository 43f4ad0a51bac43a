"""Gateway, limiter and accounting share a machine with the model and must stay small: none of them loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "serve_app.gateway.app, serve_app.limiter.limiter_service, serve_app.accounting.accounting_service",
        "deployments.gateway, deployments.limiter, deployments.accounting, deployments.model, deployments.apps",
    ],
)
def test_these_processes_do_not_load_torch(modules: str) -> None:
    look = f"import sys, {modules}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
