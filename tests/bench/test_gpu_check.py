"""The GPU check reports how each part ended, and starts on a machine that lacks most packages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check import __main__ as command
from bench.gpu_check import page, parts
from bench.harness import document

OPTIONS = {"device": "cpu", "shapes": ["tiny"]}
HANGS = """
import os, subprocess, sys, time
def run(options, report):
    report.add(before=1)
    report.doing("hanging")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (options.work / "child").write_text(str(child.pid))
    time.sleep(600)
"""
CASES = {
    "def run(options, report):\n    report.add(a={'x': 1})\n    report.add(a={'y': 2})": ("passed", None),
    "def run(options, report):\n    report.problem('one')\n    report.problem('two')": ("failed", "one; two"),
    "def run(options, report):\n    report.doing('it')\n    raise OSError('no such')": ("failed", "OSError: no such"),
    "from bench.gpu_check.part import Skip\ndef run(options, report):\n    raise Skip('no pytest')": (
        "skipped",
        "no pytest",
    ),
    "import os\ndef run(options, report):\n    report.doing('it')\n    os.abort()": (
        "crashed",
        "ended with signal SIGABRT; last: it",
    ),
    "import os\nos._exit(3)": ("crashed", "ended with status 3; last: its start"),
}


@pytest.fixture
def run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a module's text as a part."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(code: str) -> dict[str, Any]:
        (tmp_path / "a_part.py").write_text(code)
        return parts.run_part(parts.Part("tried", "Tried", 1, "a_part"), 60.0, OPTIONS, tmp_path)

    return run


@pytest.mark.parametrize("code", CASES)
def test_each_end_of_a_part_is_its_outcome(code: str, run_code: Any) -> None:
    record = run_code(code)
    assert (record["outcome"], record["reason"]) == CASES[code]
    assert record["figures"] == ({"a": {"x": 1, "y": 2}} if record["outcome"] == "passed" else {})
    assert ("log" in record) is (record["outcome"] in ("failed", "crashed"))


def test_the_log_of_a_part_that_fails_ends_with_its_traceback(run_code: Any) -> None:
    record = run_code("def run(options, report):\n    raise OSError('no such')")
    assert record["log"][-1] == "OSError: no such"


def test_a_part_that_hangs_keeps_its_figures_and_leaves_no_process(
    run_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_it_hangs(process: Any, limit_s: float) -> None:
        ends = time.monotonic() + 60
        while not (tmp_path / "child").exists():
            assert time.monotonic() < ends
            time.sleep(0.01)

    monkeypatch.setattr(parts, "_wait", until_it_hangs)
    record = run_code(HANGS)
    assert (record["outcome"], record["figures"]) == ("timed out", {"before": 1})
    assert record["reason"].endswith("last: hanging")
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_time_that_a_part_leaves_goes_to_the_later_ones() -> None:
    now = 0.0
    chosen = [parts.Part("", "", weight) for weight in (1.0, 1.0, 2.0)]
    shares = parts.limits(chosen, 40.0, lambda: now)
    assert next(shares) == 10.0
    now = 1.0
    assert next(shares) == 13.0
    now = 14.0  # it took all of it
    assert next(shares) == 26.0
    assert next(shares, None) is None


def test_the_command_loads_nothing_that_a_bare_machine_lacks() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'pydantic', 'psutil', 'yaml', 'ray', 'serve_app', 'fastapi'}"
    code = f"import sys, bench.gpu_check.__main__, bench.gpu_check.part; sys.exit(str({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=parts.ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def machine(figures: dict[str, Any], outcome: str = "passed") -> dict[str, Any]:
    return {"outcome": outcome, "reason": None, "seconds": 4.0, "figures": figures}


def test_without_a_gpu_the_command_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_part", lambda *given: machine({"cuda": "torch finds no CUDA device"}))
    assert command.main(["--work", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "gpu-check: there is no GPU to check: torch finds no CUDA device\n")
    assert json.loads((tmp_path / "out.json").read_text())["no_gpu"] == "torch finds no CUDA device"


@pytest.mark.parametrize(
    ("memory", "shapes"), [(139.8, ["1b", "7b"]), (79.2, ["1b", "7b"]), (23.6, ["1b"]), (8.0, ["small"])]
)
def test_the_shapes_are_those_that_the_card_has_memory_for(
    memory: float, shapes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}

    def run_part(part: parts.Part, limit_s: float, options: dict[str, Any], work: Path) -> dict[str, Any]:
        asked[part.name] = options["shapes"]
        return machine({"cuda": None, "memory_gib": memory})

    monkeypatch.setattr(command, "run_part", run_part)
    assert command.main(["--work", str(tmp_path), "--only", "engine"]) == 0
    assert asked["engine"] == shapes


def results() -> dict[str, Any]:
    """A run with a part of each kind."""
    step = {"plan_ms": 0.1, "launch_ms": 9.0, "wait_ms": 0.2, "sample_ms": 1.0, "commit_ms": 0.3, "all_ms": 10.6}
    step |= {"operations": 900.0, "kernels": 400.0, "kernel_ms": 0.7, "launches": 390.0, "replayed_ms": 2.1}
    shape = {"parameters": 1.24e9, "floor_ms": 0.62, "step_ms": 10.5, "floor_share": 0.06, "tokens_s": 3578.0}
    engine = {"sequences": 64, "shapes": {"1b": shape}, "steps": {"1b": {"1": step}}}
    engine |= {"transformers": {"1b": {"error": "no memory"}}}
    killed = {"ready_s": 12.0, "held_gib": 7.1, "ended_s": 0.01, "freed_s": 0.35}
    return {
        "date": "2026-11-26",
        "seconds": 250.0,
        "parts": {
            "machine": machine({"card": "NVIDIA H200", "memory_gib": 139.8, "torch": "2.11.0"}),
            "correctness": machine({"tests": {"summary": "14 passed"}}, "failed") | {"reason": "a | b"},
            "kill": machine({"shape": "1b", "one": killed}),
            "engine": machine(engine, "timed out"),
            "vllm": machine({}, "skipped") | {"reason": "vLLM is not installed"},
            "service": machine({"shape": "1b", "streams": 64}, "crashed"),
        },
    }


def speed(tokens_s: float) -> dict[str, float]:
    times = ("first_s_p50", "first_s_p99", "gap_s_p50", "gap_s_p99")
    return {"tokens_s": tokens_s, "pieces_s": 600.0, **dict.fromkeys(times, 0.1)}


def test_the_service_on_vllm_is_compared_with_vllm_under_the_same_load() -> None:
    found = results()
    found["parts"]["vllm"] = machine({"service_load": speed(20_000.0)})
    killed = {"processes": 2, "left": 0, "ended_s": 0.4, "replaced_s": 47.2}
    measured = {"service": speed(16_000.0), "own": speed(15_000.0), "start_s": 69.0, "kill": killed}
    found["parts"]["vllm-service"] = machine({"shape": "1b", "streams": 64, **measured})
    assert "| vLLM's own server | 15,000 |" in page.markdown(found)
    assert "ended after 0.4 s, and another replica replied after 47 s" in page.markdown(found)
    assert "| whole service on vLLM | 16,000 |" in page.markdown(found)
    assert "The service has 80% of the throughput of its engine alone." in page.markdown(found)
    del found["parts"]["vllm"]
    assert "of the throughput" not in page.markdown(found)


def test_the_page_shows_what_was_measured_and_why_the_rest_was_not() -> None:
    text = page.markdown(results())
    assert "| 1b | 1.24 | 0.62 | 10.50 | 6% | 3,578 | not measured |" in text
    assert "| the model's code on the host | 9 |" in text
    assert "| vLLM's engine | skipped | 4 | vLLM is not installed |" in text
    assert "| Correctness | **failed** | 4 | a \\| b |" in text
    assert "| one process | 12 | 7.1 |  | 10 | 350 |" in text


def test_the_page_of_a_run_that_ended_early_can_be_written() -> None:
    for name in ("correctness", "kill", "engine", "vllm", "service", "vllm-service"):
        early = {**results(), "parts": {"machine": machine({}), name: machine({}, "timed out")}}
        assert "**timed out**" in page.markdown(early)


def test_the_page_is_renewed_in_its_place_alone(tmp_path: Path) -> None:
    saved, target = tmp_path / "results.json", tmp_path / "page.md"
    saved.write_text(json.dumps(results()))
    target.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    assert command.main(["--render", str(saved), "--page", str(target)]) == 1  # parts have failed
    once = target.read_text()
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    page.write(target, results())
    assert target.read_text() == once


def test_the_document_has_a_place_for_it() -> None:
    document.check((parts.ROOT / "docs" / "benchmarks.md").read_text(), page.BEGIN, page.END)


@pytest.mark.slow
@pytest.mark.long
def test_all_parts_that_need_no_gpu_and_no_service_pass_on_a_cpu(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--shape", "tiny", "--work", str(tmp_path), "--json", str(tmp_path / "out.json")]
    given += ["--budget", "3600"]  # a busy machine loads torch in a minute
    only = [word for name in ("correctness", "kill", "engine") for word in ("--only", name)]
    program = [sys.executable, "-m", "bench.gpu_check", *given, *only]
    done = subprocess.run(program, cwd=parts.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert found["correctness"]["figures"]["greedy_float32"]["other_tokens"] == 0
    assert found["engine"]["figures"]["steps"]["tiny"]["4"]["operations"] > 0
    assert found["kill"]["figures"]["group"]["freed_s"] is not None
