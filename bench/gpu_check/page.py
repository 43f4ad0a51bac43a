"""Renders the results as Markdown and writes them into a document."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gpu_check.parts import PARTS
from bench.harness import document
from bench.harness.tables import table

BEGIN = "<!-- measured: written by `python -m bench.gpu_check --page`, not by hand -->"
END = "<!-- end of what bench.gpu_check measured -->"
_STEP = {
    "plan_ms": "scheduling",
    "launch_ms": "the model's code on the host",
    "wait_ms": "waiting for the GPU afterwards",
    "sample_ms": "sampling",
    "commit_ms": "text and delivery",
    "all_ms": "**all**",
    "kernel_ms": "time in kernels",
    "driver_ms": "time in the driver's launch calls",
    "kernels": "kernels",
    "launches": "launches",
    "operations": "torch operations",
    "replayed_ms": "a step without launch time",
}


def write(path: Path, results: dict[str, Any]) -> None:
    """Replaces the text between the marks of a document. Creates the document if there is none.

    Raises:
        ValueError: the document has no marks.
    """
    text = path.read_text() if path.exists() else f"# GPU check\n\n{BEGIN}\n{END}\n"
    path.write_text(document.renewed(text, BEGIN, END, markdown(results)))


def markdown(results: dict[str, Any]) -> str:
    """Returns all tables. For a part that was not measured, the page has the reason instead."""
    parts = results["parts"]
    texts = [_machine(results), _outcomes(parts)]
    for name, of_part in (("engine", _engine), ("vllm", _vllm), ("service", _service)):
        if name in parts and parts[name]["figures"]:
            texts += of_part(parts[name]["figures"])
    on_vllm = parts.get("vllm-service", {}).get("figures", {})
    if "service" in on_vllm:
        bare = parts.get("vllm", {}).get("figures", {}).get("service_load")
        share = {"share": on_vllm["service"]["tokens_s"] / bare["tokens_s"]} if bare else {}
        texts += _service({**on_vllm, "bare": bare, **share}, "vLLM through our adapter", "whole service on vLLM")
        texts += _replaced(on_vllm)
    if "correctness" in parts:
        texts += _correctness({**parts["correctness"]["figures"], "vLLM": parts.get("vllm", {}).get("figures")})
    if "kill" in parts:
        texts += _kill(parts["kill"]["figures"])
    return "\n\n".join(text for text in texts if text) + "\n"


def _machine(results: dict[str, Any]) -> str:
    found = results["parts"]["machine"]["figures"]
    libraries = found.get("libraries", {})
    named = ", ".join(f"{name} {libraries[name]}" for name in ("transformers", "vllm", "ray") if name in libraries)
    card = f"{found['card']}, {found['memory_gib']} GiB" if found.get("card") else "no GPU"
    facts = [f"{card}; driver {found.get('driver')}; CUDA {found.get('cuda_version')}", f"torch {found.get('torch')}"]
    facts += [named, f"{found.get('cores')} cores", f"a copy moves {_show(found.get('copy_gb_s'))} GB/s"]
    facts += [f"a matrix product reaches {_show(found.get('matmul_tflop_s'))} TFLOP/s"]
    facts += [f"starting one small operation takes {_show(found.get('launch_us'))} µs"]
    return f"`make gpu-check` on {results['date']}: {'; '.join(fact for fact in facts if fact)}."


def _outcomes(parts: dict[str, Any]) -> str:
    rows = []
    for part in PARTS:
        if part.name in parts:
            record = parts[part.name]
            outcome = record["outcome"] if record["outcome"] in ("passed", "skipped") else f"**{record['outcome']}**"
            reason = (record["reason"] or "").replace("|", "\\|")
            rows.append([part.title, outcome, f"{record['seconds']:.0f}", reason])
    return table(["", "outcome", "s", "why"], rows)


def _engine(found: dict[str, Any]) -> Iterable[str]:
    rows = []
    for shape, figures in found.get("shapes", {}).items():
        peer = found.get("transformers", {}).get(shape, {})
        rows.append([shape, f"{figures['parameters'] / 1e9:.2f}", f"{figures['floor_ms']:.2f}"])
        rows[-1] += [f"{figures['step_ms']:.2f}", f"{figures['floor_share']:.0%}", f"{figures['tokens_s']:,.0f}"]
        rows[-1].append(f"{peer['tokens_s']:,.0f}" if "tokens_s" in peer else "not measured")
    count = found.get("sequences")
    head = ["shape", "10⁹ weights", "floor of a step, ms", "step of one sequence, ms", "floor / step"]
    yield table([*head, f"{count} sequences, tok/s", "transformers, tok/s"], rows)
    loads = [(shape, n, steps) for shape, of in found.get("steps", {}).items() for n, steps in of.items()]
    if loads:
        head = ["ms or number in one step", *(f"{shape}, {number} at once" for shape, number, _ in loads)]
        named = [(title, [steps.get(key) for _, _, steps in loads]) for key, title in _STEP.items()]
        rows = [[title, *map(_show, values)] for title, values in named if values != [None] * len(loads)]
        yield table(head, rows)


def _vllm(found: dict[str, Any]) -> Iterable[str]:
    if "tokens_s" in found:
        facts = f"vLLM {found['version']} through our adapter, {found['shape']}, {found['sequences']} sequences"
        tests = found.get("contract", "")
        ended = tests["summary"] if isinstance(tests, dict) else tests
        rows = [[facts, f"{found['tokens_s']:,.0f}", f"{found['step_ms']:.2f}", f"{found['start_s']:.0f}", ended]]
        yield table(["", "tok/s", "step of one sequence, ms", "start, s", "contract"], rows)


def _service(found: dict[str, Any], bare: str = "bare engine", whole: str = "whole service") -> Iterable[str]:
    rows = []
    for name, title in (("bare", bare), ("service", whole), ("own", "vLLM's own server")):
        if one := found.get(name):
            rows.append([title, f"{one['tokens_s']:,.0f}", f"{one['pieces_s']:,.0f}"])
            rows[-1] += [_milliseconds(one[key]) for key in ("first_s_p50", "first_s_p99", "gap_s_p50", "gap_s_p99")]
    if rows:
        head = [f"{found['shape']}, {found['streams']} streams", "tok/s", "pieces/s"]
        yield table([*head, "first p50, ms", "first p99", "gap p50", "gap p99"], rows)
    if "share" in found:
        yield f"The service has {found['share']:.0%} of the throughput of its engine alone."


def _replaced(found: dict[str, Any]) -> Iterable[str]:
    if "replaced_s" in (kill := found.get("kill", {})):
        yield (
            f"The service was ready after {found['start_s']:.0f} s. `kill -9` of the replica in the middle of a reply: "
            f"the engine's {kill['processes']} processes ended after {kill['ended_s']:.1f} s, and another replica "
            f"replied after {kill['replaced_s']:.0f} s."
        )


def _correctness(found: dict[str, Any]) -> Iterable[str]:
    tests = found.get("tests")
    if tests:
        yield f"`tests/engine/test_cuda.py`: {tests['summary'] if isinstance(tests, dict) else tests}."
    if greedy := found.get("greedy_float32"):
        same = greedy["tokens"] - greedy["other_tokens"]
        yield (
            f"In float32, {same} of {greedy['tokens']} greedy tokens equal those of transformers; log-probabilities "
            f"differ by at most {greedy.get('logprob_error_max', 0):.1e}."
        )
    judged = [("our engine", found.get("bfloat16")), ("vLLM", (found["vLLM"] or {}).get("bfloat16"))]
    rows = [[name, one["shape"], *map(_small, (one["error_mean"], one["error_max"]))] for name, one in judged if one]
    for row, one in zip(rows, [one for _, one in judged if one], strict=True):
        row += [_small(one["transformers_error_mean"]), _small(one["transformers_error_max"])]
    if rows:
        head = ["error of log-probabilities in bfloat16 against float32", "shape", "mean", "largest"]
        yield table([*head, "transformers: mean", "largest"], rows)


def _kill(found: dict[str, Any]) -> Iterable[str]:
    rows = []
    for name, title in (("one", "one process"), ("group", "a group of two")):
        if "held_gib" in (one := found.get(name, {})):
            after = one.get("held_after_leader_gib")
            rows.append([title, _show(one.get("ready_s")), _show(one["held_gib"])])
            rows[-1] += [_show(after), _milliseconds(one.get("ended_s")), _milliseconds(one.get("freed_s"))]
    if rows:
        head = [f"`kill -9`, {found['shape']}", "start, s", "held, GiB", "held after the leader's death, GiB"]
        yield table([*head, "ended, ms", "memory freed, ms"], rows)


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _small(value: float) -> str:
    return f"{value:.4f}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:,.0f}"
