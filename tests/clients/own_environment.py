"""Runs tests and programs in environments apart from the suite's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.served import Served

INI = """
[pytest]
addopts = -q -p no:cacheprovider -rfEX
asyncio_mode = auto
asyncio_default_test_loop_scope = session
asyncio_default_fixture_loop_scope = session
"""


def passes(python: Path, file: Path, service: Served, folder: Path, **more: str) -> None:
    """Runs a file of tests with the clients' own pytest; each needs a client that holds its connections in one loop."""
    settings = folder / "pytest.ini"
    settings.write_text(INI)
    command = [python, "-m", "pytest", "-c", settings, "--rootdir", file.parent, "--confcutdir", file.parent, file]
    keys = {
        "SERVICE_URL": service.base_url,
        "SERVICE_KEY": service.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    run(command, file.parent, {**keys, **more})


def run(command: Sequence[str | Path], folder: Path, environment: dict[str, str], needs: Path | None = None) -> str:
    """Returns what a program prints. Skips the test if the program, or the file that it needs, is not installed."""
    for path in (Path(command[0]), needs):
        if path is not None and not path.exists():
            if os.environ.get("CI"):
                pytest.fail(f"{path} is not installed")
            pytest.skip(f"{path.name} is not installed: `make test-long` installs it")
    done = subprocess.run(
        [*command],
        env={**os.environ, **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
