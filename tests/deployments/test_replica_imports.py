"""Tests of what processes must not load.

Replicas run on vLLM's environment, and all other processes must stay small beside a model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = {"sqlalchemy", "alembic", "psycopg", "typer", "rich", "grafana_client", "httpx"}
ROOMS = {"accounting", "admin", "api", "cli", "gateway", "launch"}

PROGRAM = """
import json, sys
import deployments.model
replica = [*sys.modules]
import deployments.gateway, deployments.limiter, deployments.accounting, deployments.apps
import serve_app.gateway.app, serve_app.limiter.limiter_service, serve_app.accounting.accounting_service
print(json.dumps({"replica": replica, "all": [*sys.modules]}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules after the import of a replica's code, and then of all other processes'."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


def test_a_replica_imports_nothing_that_only_other_parts_need(loaded: dict[str, set[str]]) -> None:
    modules = loaded["replica"]
    assert "serve_app.model.replica" in modules
    assert not OTHERS & {module.split(".")[0] for module in modules}
    assert not ROOMS & {module.split(".")[1] for module in modules if module.startswith("serve_app.")}


def test_gateway_limiter_and_accounting_do_not_load_torch(loaded: dict[str, set[str]]) -> None:
    assert "serve_app.gateway.app" in loaded["all"]
    assert not {"torch", "transformers"} & loaded["all"]
