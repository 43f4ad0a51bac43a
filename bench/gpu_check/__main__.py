"""Checks and measures on one GPU, in at most eleven minutes: `make gpu-check`, or `python -m bench.gpu_check --help`.

It needs torch and the engine's packages, but no network. A part whose packages are missing is skipped, with the
reason. The exit status is 0 if no part failed, 1 if one did, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_check import page
from bench.gpu_check.parts import PARTS, ROOT, limits, run_part

SHAPES = ("tiny", "small", "1b", "7b")
MIN_GPU_MEMORY_GIB = {"1b": 10, "7b": 40}  # by model shape


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = _options(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        results = check(options)
        if results["no_gpu"] and options.device != "cpu":
            print(f"gpu-check: there is no GPU to check: {results['no_gpu']}", file=sys.stderr)
            return 2
        print(page.markdown(results))
    if options.page:
        page.write(options.page, results)
    return 0 if all(part["outcome"] in ("passed", "skipped") for part in results["parts"].values()) else 1


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts in turn. Writes the results so far to the `--json` file after each part."""
    began = time.time()
    work: Path = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name == "machine" or not options.only or part.name in options.only]
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime(began)), "commit": _commit()}
    results |= {"device": options.device, "budget_s": options.budget, "no_gpu": None, "parts": {}}
    chosen = {"device": options.device, "shapes": options.shape or ["small"]}
    missing = {part.name: reason for part in parts if (reason := part.missing()) is not None}
    for name, reason in missing.items():
        results["parts"][name] = {"outcome": "skipped", "reason": reason, "seconds": 0.0, "figures": {}}
    running = [part for part in parts if part.name not in missing]
    try:
        for part, limit_s in zip(running, limits(running, options.budget), strict=True):
            record = run_part(part, limit_s, chosen, work)
            results["parts"][part.name] = record
            results["seconds"] = round(time.time() - began, 1)
            if part.name == "machine":
                found = record["figures"]
                results["no_gpu"] = found.get("cuda", record["reason"])
                fitting = [shape for shape, least in MIN_GPU_MEMORY_GIB.items() if found.get("memory_gib", 0) >= least]
                chosen["shapes"] = options.shape or fitting or ["small"]
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
            absent = part.name == "machine" and results["no_gpu"] and options.device != "cpu"
            if not absent or record["outcome"] != "passed":
                _say(part.name, record)
            if absent:
                break
    finally:
        for folder in work.glob("model-*"):
            shutil.rmtree(folder, ignore_errors=True)
    return results


def _say(name: str, record: dict[str, Any]) -> None:
    reason = f": {record['reason']}" if record["reason"] else ""
    print(f"gpu-check: {name} {record['outcome']} in {record['seconds']:.0f} s{reason}", file=sys.stderr, flush=True)
    for line in record.get("log", ()):
        print(f"    {line}", file=sys.stderr)
    sys.stderr.flush()


def _commit() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE, after each part")
    parser.add_argument("--page", type=Path, metavar="FILE", help="update the GPU section of this document")
    parser.add_argument("--render", type=Path, metavar="FILE", help="run no checks: render results written by --json")
    parser.add_argument("--budget", type=float, default=660.0, metavar="SECONDS", help="for all parts; default: 660")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="default: all parts")
    parser.add_argument("--device", default="cuda:0", help="cpu tests this program without a GPU; default: cuda:0")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="model shape; default: all that fit the GPU")
    work = ROOT / ".bench" / "gpu-check"
    parser.add_argument("--work", type=Path, default=work, help="folder for logs and models; default: .bench/gpu-check")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the part that runs
    sys.exit(main())
