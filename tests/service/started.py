"""A whole service for tests: started by the same launcher as `make serve`, on a free port and a fresh home.

`SERVE_APP_TEST_CONFIG` names another config file than the tests' own: `make test-vllm` runs some of them so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from serve_app.launch.preflight import free_port
from tests.service.harness import Service

ROOT = Path(__file__).parents[2]
OTHER_CONFIG = os.environ.get("SERVE_APP_TEST_CONFIG")


@contextlib.contextmanager
def started(model_path: Path, config: str | None = None, **environment: str) -> Iterator[Service]:
    """`model_path` is the bundled model's folder; `environment` is added to that of the service.

    `config` is a file of a test's own.
    """
    with tempfile.TemporaryDirectory(prefix="serve-app-test-") as folder:
        home = Path(folder)
        (home / "models").symlink_to(model_path.parent)
        # What is made once from the weights serves all starts.
        (prepared := model_path.parents[1] / "cache").mkdir(exist_ok=True)
        (home / "cache").symlink_to(prepared)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "serve_app.launch", "--json", "--config",
                config or OTHER_CONFIG or "tests/service/config.yaml",
                "--port", str(free_port()), "--home", str(home), "--num-cpus", "4",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_metrics_report_interval_ms": "1000", **environment},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the service did not start (exit code {process.wait(30)})"
            yield Service(json.loads(line), process)
        finally:
            if process.poll() is None:  # the last test ends it itself
                process.send_signal(signal.SIGTERM)
                process.wait(60)
