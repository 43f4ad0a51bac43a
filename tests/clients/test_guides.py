"""The examples of docs/clients.md, run unchanged except for a real address and key."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest
import yaml

from tests.clients.apart import NODE, PYTHON
from tests.clients.conftest import ROOT
from tests.clients.served import Served

ADDRESS, KEY = "http://127.0.0.1:8000/v1", "YOUR_KEY"
BY_HAND = ("aider", "Open WebUI", "Continue")  # programs with a user interface

HEAVY = ("LangChain", "LlamaIndex", "LiteLLM")  # seconds to import
LONG = [pytest.mark.slow, pytest.mark.long]


@dataclass(frozen=True)
class Example:
    client: str
    language: str
    code: str


def examples() -> list[Example]:
    found, client = [], ""
    text = (ROOT / "docs" / "clients.md").read_text()
    for heading, language, code in re.findall(r"^## ([^\n]+)$|^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        client = heading or client
        if code:
            found.append(Example(client, language, code))
    return found


RUN = [example for example in examples() if example.client not in BY_HAND]


def output(example: Example, service: Served, python: str | None = None) -> str:
    """Returns what an example prints. Without `python`, a Python example runs in this process."""
    assert ADDRESS in example.code
    assert KEY in example.code
    code = example.code.replace(ADDRESS, service.base_url).replace(KEY, service.key)
    if example.language == "python" and python is None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, example.client, "exec", dont_inherit=True), {"__name__": "__main__"})
        return printed.getvalue()
    commands = {
        "sh": ["bash", "-euo", "pipefail", "-s"],
        "python": [str(python), "-"],
        "js": ["node", "--input-type=module", "-"],
    }
    done = subprocess.run(
        commands[example.language],
        input=code,
        cwd=NODE if example.language == "js" else ROOT,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_client_has_a_guide() -> None:
    clients = {"curl", "OpenAI SDK for Python", "OpenAI SDK for Node", "LangChain", "LlamaIndex", "LiteLLM"}
    assert {example.client for example in examples()} == clients | set(BY_HAND)
    assert {example.client for example in RUN} == clients


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=f"{number}, {example.client}", marks=LONG * (example.client in HEAVY))
        for number, example in enumerate(RUN, 1)
    ],
)
def test_an_example_answers(example: Example, capable: Served) -> None:
    program = {"sh": "curl", "js": "node"}.get(example.language)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    python = None
    if example.client in HEAVY:
        python = str(PYTHON)
        if not PYTHON.exists():
            pytest.skip("`make test` installs these clients")
    if example.language == "js" and not (NODE / "node_modules").exists():
        pytest.skip("`make test` installs the SDK for Node where there is npm")
    assert "Paris" in output(example, capable, python)


@pytest.mark.slow
def test_the_examples_work_with_the_sdk_of_the_major_version_before(capable: Served) -> None:
    if not PYTHON.exists():
        pytest.skip("`make test` installs it beside the other clients")
    for example in RUN:
        if example.client == "OpenAI SDK for Python":
            assert "Paris" in output(example, capable, str(PYTHON))


def test_the_settings_of_programs_name_the_address_the_key_and_a_model() -> None:
    for example in examples():
        if example.client in BY_HAND and example.language != "json":
            assert ADDRESS in example.code
            assert KEY in example.code
    [settings] = [yaml.safe_load(example.code) for example in examples() if example.language == "yaml"]
    assert settings["models"][0]["model"] == "svc-coder"
