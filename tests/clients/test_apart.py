"""Clients that run in other processes: LangChain's standard tests, LiteLLM, LlamaIndex and the SDK for Node.

Those that leave a choice to the model run against the scripted one, `tests.clients.capable`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.apart import NODE, PYTHON
from tests.clients.own_environment import passes
from tests.clients.served import Served

APART = Path(__file__).parent / "apart"


@pytest.mark.slow
def test_langchains_standard_tests_pass_with_a_capable_model(capable: Served, tmp_path: Path) -> None:
    passes(PYTHON, APART / "langchain_standard.py", capable, tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_litellm_and_llama_index_make_a_round_trip_with_a_forced_call(service: Served, tmp_path: Path) -> None:
    passes(PYTHON, APART / "round_trip.py", service, tmp_path, FORCED="1")


@pytest.mark.slow
def test_litellm_and_llama_index_make_a_round_trip_where_the_model_chooses(capable: Served, tmp_path: Path) -> None:
    passes(PYTHON, APART / "round_trip.py", capable, tmp_path)


@pytest.mark.parametrize("package", ["openai", pytest.param("openai-6", marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_sdk_for_node_passes_the_core_cases(service: Served, package: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules").exists():
        pytest.skip("`make test` installs the SDK for Node where there is npm")
    done = subprocess.run(
        [node, "--test", "core.test.js"],
        env={
            **os.environ,
            "OPENAI_PACKAGE": package,
            "SERVICE_URL": service.base_url,
            "SERVICE_KEY": service.key,
            "EMPTY_KEY": service.account(credit=0),
            "SLOW_KEY": service.account(rpm=1),
        },
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
