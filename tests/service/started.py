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
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve_app.launch.preflight import free_port
from tests.service.harness import Service

ROOT = Path(__file__).parents[2]
OTHER_CONFIG = os.environ.get("SERVE_APP_TEST_CONFIG")


#: Ray waits for its own processes as long as a slow machine needs.
PATIENT = {"RAY_agent_register_timeout_ms": "600000", "RAY_worker_register_timeout_seconds": "600"}
TRIES = 5
READY_S = 600


@contextlib.contextmanager
def started(
    model_path: Path,
    config: str | None = None,
    *,
    dashboard: bool = False,
    options: Sequence[str] = (),
    **environment: str,
) -> Iterator[Service]:
    """`model_path` is the bundled model's folder; `environment` is added to that of the service.

    `config` is a file of a test's own, `options` are further ones of the launcher. Ray's `dashboard` takes changed
    configurations.
    """
    with tempfile.TemporaryDirectory(prefix="serve-app-test-") as folder:
        home = Path(folder)
        (home / "models").symlink_to(model_path.parent)
        # What is made once from the weights serves all starts.
        (prepared := model_path.parents[1] / "cache").mkdir(exist_ok=True)
        (home / "cache").symlink_to(prepared)
        command = [
            *launch(home, dashboard=dashboard),
            "--config",
            config or OTHER_CONFIG or "tests/service/config.yaml",
            *options,
        ]
        for tries_left in reversed(range(TRIES)):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RAY_metrics_report_interval_ms": "1000", **PATIENT, **environment},
            )
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line and tries_left and was_too_slow(home):
                    continue
                assert line, f"the service did not start (exit code {process.wait(60)})"
                yield Service(json.loads(line), process)
                return
            finally:
                if process.poll() is None:  # the last test ends it itself
                    process.send_signal(signal.SIGTERM)
                process.wait(120)


def launch(home: Path, *, dashboard: bool = False) -> list[str]:
    """The command of the launcher, which waits as long as a slow machine needs."""
    command = [sys.executable, "-m", "serve_app.launch", "--json", "--ready-timeout", str(READY_S)]
    command += ["--port", str(free_port()), "--home", str(home), "--num-cpus", "4"]
    return command if dashboard else [*command, "--no-dashboard"]


def was_too_slow(home: Path) -> bool:
    """Returns whether a start failed because Ray's node took more than 30 s. Ray (2.60) has no setting for it."""
    return "timed out during startup" in (home / "logs" / "driver.log").read_text()
