"""Runs the CUDA tests. Compares our engine with transformers: float32 greedy tokens, bfloat16 log-probabilities."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_check.part import Options, Report
from bench.gpu_check.parts import ROOT

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 160, 300)  # tokens; some around the block size
REPLY = 32  # tokens
MAX_GAP = 1e-3  # float32: maximum difference between the log-probabilities of tied tokens
MAX_ERROR = 1e-3  # float32: maximum error of a log-probability
MAX_RATIO = 2.0  # bfloat16: maximum ratio of our error to that of transformers


def run(options: Options, report: Report) -> None:
    """Runs the tests for CUDA and both comparisons."""
    report.doing("tests/engine/test_cuda.py")
    if find_spec("pytest") is None:
        report.add(tests="skipped: pytest is not installed")
    else:
        limit = options.limit_s * 0.6
        found = pytest_figures(sys.executable, ["--noconftest", "tests/engine/test_cuda.py"], options.work, limit)
        report.add(tests=found)
        if found["failed"] or (options.on_gpu and not found["passed"]):
            report.problem(f"tests/engine/test_cuda.py: {found['summary']}")
    greedy(options, report)
    bfloat16(options, report)


def pytest_figures(python: str, tests: list[str], work: Path, limit_s: float) -> dict[str, Any]:
    """Runs tests without the project's pytest settings, whose plugins may be absent. The output goes to the log."""
    result = work / "junit.xml"
    result.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not long"]
    try:
        done = subprocess.run([*command, f"--junitxml={result}", *tests], cwd=ROOT, timeout=limit_s, check=False)
        summary = f"pytest ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        summary = f"pytest did not finish within {limit_s:.0f} s"
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    cases = ElementTree.parse(result).getroot().iter("testcase") if result.is_file() else ()
    for case in cases:
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        kind = "failed" if wrong is not None else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if wrong is not None:
            failures[str(case.get("name"))] = " ".join((wrong.get("message") or "").split())[:300]
    if not sum(counts.values()):
        counts["failed"] = 1
        failures["collection"] = summary
    else:
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return {**counts, "summary": summary, "failures": failures}


def greedy(options: Options, report: Report) -> None:
    """Checks that in float32 each token is the reference's choice or tied with it, and that log-probabilities agree."""
    import torch

    from bench.gpu_check import models

    report.doing("greedy tokens in float32")
    shape = "small" if options.on_gpu else "tiny"
    reference = models.make_model(shape, torch.device(options.device), torch.float32)
    asked = models.prompts(reference.config.vocab_size, LENGTHS)
    ours = models.make_model(shape, torch.device(options.device), torch.float32)
    engine = models.make_engine(ours, models.engine_settings("float32"))
    try:
        said = models.replies(engine, asked, REPLY)
    finally:
        engine.close()
    found = models.score(reference, asked, said)
    other, gap = int((found.gaps > 0).sum()), float(found.gaps.max())
    report.add(greedy_float32={"tokens": len(found.gaps), "other_tokens": other, "largest_gap": gap})
    error = float(models.errors(said, found).max())
    report.add(greedy_float32={"logprob_error_max": error})
    if not error <= MAX_ERROR:
        report.problem(f"float32: a log-probability differs from the reference's by {error:.2g}")
    if not gap <= MAX_GAP:
        report.problem(f"float32: {other} of {len(found.gaps)} tokens differ from the reference, gap up to {gap:.2g}")


def bfloat16(options: Options, report: Report) -> None:
    """Checks that the engine's mean error in bfloat16 is at most MAX_RATIO times that of transformers, plus 1e-3.

    An error is the difference of a log-probability from that of transformers in float32.
    """
    import torch

    from bench.gpu_check import models

    report.doing("log-probabilities in bfloat16")
    device, shape = torch.device(options.device), options.shapes[0]
    reference = models.make_model(shape, device, torch.bfloat16)
    asked = models.prompts(reference.config.vocab_size, LENGTHS)
    settings = models.engine_settings("bfloat16", kv_cache_memory="1GiB")
    engine = models.make_engine(models.make_model(shape, device, torch.bfloat16), settings)
    try:
        said = models.replies(engine, asked, REPLY)
    finally:
        engine.close()
    judge(report, "bfloat16", shape, reference, asked, said)


def judge(report: Report, name: str, shape: str, reference: Any, asked: Any, said: Any) -> None:
    """Compares an engine's error with that of `reference`, transformers' model with the same weights.

    Converts `reference` to float32, because both errors are differences from its scores in float32.
    """
    from bench.gpu_check import models

    theirs = models.score(reference, asked, said)
    exact = models.score(reference.float(), asked, said)
    ours, their = models.errors(said, exact), (theirs.logprobs - exact.logprobs).abs()
    figures = {"shape": shape, "tokens": len(ours), "error_mean": float(ours.mean()), "error_max": float(ours.max())}
    figures |= {"transformers_error_mean": float(their.mean()), "transformers_error_max": float(their.max())}
    figures |= {"largest_gap": float(exact.gaps.max())}
    report.add(**{name: figures})
    if not ours.mean() <= MAX_RATIO * their.mean() + 1e-3:
        report.problem(f"{name}: the mean error is {ours.mean():.2g}, that of transformers {their.mean():.2g}")
