"""The examples of docs/quick-start.md and docs/clients.md, run unchanged except for a real address and key.

Settings of programs are run by `test_programs`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.clients import programs
from tests.clients.apart import NODE, PYTHON
from tests.clients.guide import HOST, KEY, ROOT, Example, examples
from tests.clients.served import Served

SDKS = {"A first call", "A streamed call", "curl", "OpenAI SDK for Python", "OpenAI SDK for Node", "Anthropic SDKs"}
APART = {"LangChain", "LlamaIndex", "LiteLLM"}
FRAMEWORKS = {"OpenAI's Agents SDK", "pydantic-ai", "Haystack"}
SETTINGS = {"codex", "opencode", "Qwen Code", "inspect-ai", "lm-evaluation-harness"}
BY_HAND = {"CrewAI", "Claude Code", "aider", "Continue", "Open WebUI", "llm", "guidellm", "promptfoo"}
LONG = [pytest.mark.slow, pytest.mark.long]
KINDS = {"python", "js", "sh"}

RUN = [
    example
    for example in examples()
    if example.client in SDKS | APART | FRAMEWORKS | {"AI SDK"} and example.language in KINDS
]


def output(example: Example, service: Served, python: str | None = None) -> str:
    """Returns what an example prints. Without `python`, a Python example runs in this process."""
    assert HOST in example.code
    assert KEY in example.code
    code = example.with_service(service.url, service.key)
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
    assert {example.client for example in examples()} == SDKS | APART | FRAMEWORKS | SETTINGS | BY_HAND | {"AI SDK"}


def marks(example: Example) -> list[pytest.MarkDecorator]:
    if example.client == "AI SDK":
        return [pytest.mark.slow]
    return LONG * (example.client in APART | FRAMEWORKS)  # seconds to import


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=f"{number}, {example.client}", marks=marks(example))
        for number, example in enumerate(RUN, 1)
    ],
)
def test_an_example_answers(example: Example, capable: Served) -> None:
    program = {"sh": "curl", "js": "node"}.get(example.language)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    python = {**dict.fromkeys(APART, PYTHON), **dict.fromkeys(FRAMEWORKS, programs.PYTHON)}.get(example.client)
    if python is not None and not python.exists():
        pytest.skip("`make test-long` installs these clients")
    if example.language == "js" and not (NODE / "node_modules").exists():
        pytest.skip("`make test` installs the SDKs for Node where there is npm")
    assert "Paris" in output(example, capable, None if python is None else str(python))


@pytest.mark.slow
def test_the_examples_work_with_the_sdk_of_the_major_version_before(capable: Served) -> None:
    if not PYTHON.exists():
        pytest.skip("`make test` installs it beside the other clients")
    for example in RUN:
        if example.client == "OpenAI SDK for Python":
            assert "Paris" in output(example, capable, str(PYTHON))


@pytest.mark.parametrize("example", [pytest.param(each, id=each.client) for each in examples()])
def test_the_settings_of_a_program_can_be_read_and_name_the_service(example: Example) -> None:
    if example.client != "aider" or example.language != "json":
        assert HOST in example.code
        assert KEY in example.code or example.client in ("codex", "llm")
    readers = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
    if example.language in readers:
        assert readers[example.language](example.code)
