"""Clients that run in other processes: LangChain's standard tests, LiteLLM, LlamaIndex, and SDKs for Node.

Those that leave a choice to the model run against the scripted one, `tests.clients.capable`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clients.apart import NODE, PYTHON
from tests.clients.own_environment import passes, run
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


def node_passes(file: str, service: Served, **more: str) -> None:
    """Runs a file of tests of Node's own runner."""
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules").exists():
        pytest.skip("`make test` installs the SDKs for Node where there is npm")
    keys = {"SERVICE_KEY": service.key, "EMPTY_KEY": service.account(credit=0), "SLOW_KEY": service.account(rpm=1)}
    run([node, "--test", file], NODE, {"SERVICE_URL": service.base_url, **keys, **more})


@pytest.mark.parametrize("package", ["openai", pytest.param("openai-6", marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_sdk_for_node_passes_the_core_cases(service: Served, package: str) -> None:
    node_passes("core.test.js", service, OPENAI_PACKAGE=package)


def test_the_sdks_for_node_pass_the_core_cases_of_the_other_formats(service: Served) -> None:
    node_passes("formats.test.js", service)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ai_sdk.test.js", "agents_sdk.test.js"])
def test_a_framework_for_node_passes_its_cases(capable: Served, file: str) -> None:
    node_passes(file, capable)
