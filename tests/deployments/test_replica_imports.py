"""A replica's code runs on vLLM's environment, which has none of what only other parts of the service need."""

from __future__ import annotations

import subprocess
import sys

OTHERS = {"sqlalchemy", "alembic", "psycopg", "typer", "rich", "fastapi_offline", "grafana_client", "httpx"}
ROOMS = {"accounting", "admin", "api", "cli", "gateway", "launch"}


def test_a_replica_imports_nothing_that_only_other_parts_need() -> None:
    program = "import sys, deployments.model; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "serve_app.model.replica" in modules
    assert not OTHERS & {module.split(".")[0] for module in modules}
    assert not ROOMS & {module.split(".")[1] for module in modules if module.startswith("serve_app.")}
