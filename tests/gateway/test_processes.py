"""Gateway, limiter and accounting share a machine with the model and must stay small: none of them loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "serve_app.gateway.app, serve_app.gateway.limiter, serve_app.gateway.accounting, serve_app.ledger.spool",
        "deployments.gateway, deployments.limiter, deployments.accounting, deployments.model, serve_app.apps",
    ],
)
def test_torch_is_not_loaded(modules: str) -> None:
    look = f"import sys, {modules}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
