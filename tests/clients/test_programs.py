"""Programs as their users run them: coding agents, agent frameworks, evaluation tools and a proxy.

Each runs in the environment of tests/clients/programs, with the settings of docs/clients.md and defaults for the rest.
The model is `tests.clients.capable` with room for the agents' long prompts, except for log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine
from tests.clients.capable import JOKE, capable_engine
from tests.clients.guide import settings_of
from tests.clients.own_environment import passes, run
from tests.clients.programs import NODE, PROGRAMS, PYTHON
from tests.clients.served import Served, engine_of, serve

pytestmark = [pytest.mark.slow, pytest.mark.long]

HELLO = "hello-from-the-tool"
MAX_CONTEXT = 2**18  # a token of the scripted model is a byte


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("programs"), lambda: capable_engine(MAX_CONTEXT)) as running:
        yield running


@pytest.mark.parametrize("file", ["agents_sdk", "pydantic_agents", "inspect_evaluation", "litellm_proxy"])
def test_a_python_program_passes_its_cases(service: Served, tmp_path: Path, file: str) -> None:
    passes(PYTHON, PROGRAMS / f"{file}.py", service, tmp_path)


def program(name: str, *arguments: str, folder: Path, **environment: str) -> str:
    """Returns what a coding agent prints that works in `folder` and has its home there."""
    home = folder / "home"
    home.mkdir()
    names = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    places = dict.fromkeys(names, str(home)) | {"HOME": str(home), "PWD": str(folder)}
    return run([NODE / name, *arguments], folder, {**places, **environment})


def settings(client: str, language: str, service: Served) -> str:
    """Returns the settings of docs/clients.md."""
    return settings_of(client, language).with_service(service.url, service.key)


def test_codex_runs_a_command_and_answers_from_its_output(service: Served, tmp_path: Path) -> None:
    # A token of the scripted model is a byte, so the prompt is longer than with a real one.
    text = settings("codex", "toml", service).replace("= 32768", f"= {MAX_CONTEXT}")
    (tmp_path / "config.toml").write_text(text)
    printed = program(
        "codex",
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
        f"Use exec_command to run 'echo {HELLO}'.",
        folder=tmp_path,
        CODEX_HOME=str(tmp_path),
        SERVICE_KEY=service.key,
    )
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [command] = [item for item in items if item["type"] == "command_execution"]
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, HELLO)
    *_, answer = [item["text"] for item in items if item["type"] == "agent_message"]
    assert HELLO in answer
    [usage] = [event["usage"] for event in events if event["type"] == "turn.completed"]
    assert usage["input_tokens"] > 1000
    assert usage["output_tokens"] > 0


@pytest.mark.parametrize("limited", [True, False], ids=["as documented", "without a limit"])
def test_opencode_runs_a_command(service: Served, tmp_path: Path, limited: bool) -> None:
    chosen = json.loads(settings("opencode", "json", service))
    [model] = chosen["provider"]["service"]["models"].values()
    model["limit"]["context"] = MAX_CONTEXT
    if not limited:
        del model["limit"]  # it asks for 32,000 tokens of output then
    (tmp_path / "opencode.json").write_text(json.dumps(chosen))
    printed = program(
        *("opencode", "run", f"Use bash to run 'echo {HELLO}'."),
        folder=tmp_path,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert f"The answer is {HELLO}" in printed


def test_qwen_code_runs_a_command(service: Served, tmp_path: Path) -> None:
    exported, _ = settings("Qwen Code", "sh", service).splitlines()
    printed = program(
        *("qwen", "--auth-type", "openai", "-y", "-p", f"Use run_shell_command to run 'echo {HELLO}'."),
        folder=tmp_path,
        **dict(word.split("=", 1) for word in exported.split()[1:]),
    )
    assert HELLO in printed


def test_llm_answers_and_fills_a_schema(service: Served, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(settings("llm", "yaml", service))
    environment = {"LLM_USER_PATH": str(tmp_path)}
    llm = [PYTHON.with_name("llm"), "-m", "svc-chat"]
    run([llm[0], "keys", "set", "service", "--value", service.key], tmp_path, environment)
    assert "Paris" in run([*llm, "Name the capital of France."], tmp_path, environment)
    assert json.loads(run([*llm, "--schema", "setup, punchline", "Tell a joke."], tmp_path, environment)) == JOKE


EXAMPLES = [
    ("The capital of France is", [" Paris", " Rome"]),
    ("Two and two are", [" four", " five", " many"]),
    ("The opposite of hot is", [" cold", " warm"]),
    ("Water freezes at zero", [" degrees", " apples"]),
    ("A year has twelve", [" months", " days"]),
]
TASK = """
task: five
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def test_lm_evaluation_harness_scores_five_examples_as_transformers_does(
    tiny: Any, tiny_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "service").mkdir()
    with serve(tmp_path / "service", lambda: float_engine(tiny_path)) as service:
        data = [{"question": question, "choices": choices} for question, choices in EXAMPLES]
        (tmp_path / "five.jsonl").write_text("\n".join(json.dumps(line) for line in data))
        (tmp_path / "five.yaml").write_text(TASK.replace("FILE", str(tmp_path / "five.jsonl")))
        documented = settings("lm-evaluation-harness", "sh", service).replace("\\\n", "").splitlines()[1]
        command = documented.replace("hellaswag", "five").replace("TOKENIZER", str(tiny_path)).split()
        more = ["--include_path", tmp_path, "--log_samples", "--output_path", tmp_path / "scores"]
        environment = {"OPENAI_API_KEY": service.key, "HF_HOME": str(tmp_path / "home")}
        run([PYTHON.with_name(command[0]), *command[1:], *more], tmp_path, environment)
    [found] = (tmp_path / "scores").rglob("samples_five_*.jsonl")
    samples = sorted((json.loads(line) for line in found.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    for (question, choices), sample in zip(EXAMPLES, samples, strict=True):
        scores = [float(score) for [(score, _)] in sample["resps"]]
        assert scores == pytest.approx([log_likelihood(tiny, question, choice) for choice in choices], abs=1e-3)


def float_engine(model: Path) -> Engine:
    return engine_of(EngineSettings(model=str(model), dtype="float32", kv_cache_memory=2**26))


@torch.inference_mode()
def log_likelihood(model: Any, question: str, choice: str) -> float:
    """Returns the log-probability of a continuation, by transformers."""
    start = len(model.tokenizer(question, add_special_tokens=False).input_ids)
    [ids] = model.tokenizer(question + choice, add_special_tokens=False, return_tensors="pt").input_ids
    logprobs = torch.log_softmax(model.model(ids[None]).logits[0].double(), -1)
    return float(sum(logprobs[at - 1, ids[at]] for at in range(start, len(ids))))
