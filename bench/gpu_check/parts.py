"""The parts of the check. Each runs in a separate process with a time limit, so a crash does not affect the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
LOG_LINES: Final = 60  # last lines of the log to include in the results of a part that did not pass
_MARK: Final = "GPU_CHECK_RUN"  # environment variable that marks all processes of a part
_SERVICE: Final = ("ray", "fastapi", "sqlalchemy", "httpx", "psutil")


def vllm_python() -> str | None:
    """The interpreter with vLLM: this one, SERVE_APP_VLLM_PYTHON, or that of `make engine-vllm`; None without vLLM."""
    if find_spec("vllm") is not None:
        return sys.executable
    named = os.environ.get("SERVE_APP_VLLM_PYTHON") or str(ROOT / ".vllm" / "bin" / "python")
    return named if Path(named).is_file() else None


def _no_vllm() -> str | None:
    return None if vllm_python() else "vLLM is not installed: make engine-vllm ARGS='--device cuda'"


def _no_service() -> str | None:
    absent = [name for name in _SERVICE if find_spec(name) is None]
    return f"{', '.join(absent)}: not installed (make setup)" if absent else None


@dataclass(frozen=True)
class Part:
    """One part; `module` has `run(options, report)`."""

    name: str
    title: str
    weight: float  # its share of the time, relative to the other parts
    module: str = ""
    missing: Callable[[], str | None] = lambda: None  # the reason to skip it
    python: Callable[[], str | None] = lambda: sys.executable


PARTS: Final = (
    Part("machine", "Machine", 40, "bench.gpu_check.machine"),
    Part("correctness", "Correctness", 90, "bench.gpu_check.correctness"),
    Part("kill", "kill -9", 60, "bench.gpu_check.kill"),
    Part("engine", "Our engine", 150, "bench.gpu_check.engine"),
    Part("vllm", "vLLM's engine", 220, "bench.gpu_check.vllm_engine", _no_vllm, vllm_python),
    Part("service", "The whole service", 90, "bench.gpu_check.service", _no_service),
    Part(
        "vllm-service",
        "The whole service on vLLM",
        260,
        "bench.gpu_check.vllm_service",
        lambda: _no_service() or _no_vllm(),
    ),
)


def limits(parts: Iterable[Part], budget_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Yields each part's time limit in seconds: its share of the time left. Later parts share unused time."""
    waiting, ends = list(parts), clock() + budget_s
    while waiting:
        share = waiting[0].weight / sum(part.weight for part in waiting)
        yield max(1.0, (ends - clock()) * share)
        del waiting[0]


def run_part(part: Part, limit_s: float, options: dict[str, Any], work: Path) -> dict[str, Any]:
    """Runs a part and ends all its processes. Returns its record.

    `outcome` is passed, failed, skipped, crashed or timed out. `figures` has everything that the part reported.
    """
    result, log = work / f"{part.name}.json", work / f"{part.name}.log"
    result.unlink(missing_ok=True)
    token = uuid.uuid4().hex
    environment = {**os.environ, _MARK: token, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if part.name.startswith("vllm"):  # both parts share compiled kernels: FlashInfer's alone take 93 s to compile
        from serve_app.engine.vllm_adapter import process_environment

        environment = {**process_environment.variables(work / "cache"), **environment}
    if options["device"] == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # the models are tiny
    given = json.dumps({**options, "limit_s": limit_s, "work": str(work)})
    command = [part.python() or sys.executable, "-m", "bench.gpu_check.part", part.module, str(result), given]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(process, limit_s)
        finally:
            _end(process, token)
    found = _read(result)
    outcome, reason = found.get("outcome"), found.get("reason")
    if code is None:
        outcome, reason = "timed out", f"not finished after {limit_s:.0f} s; last: {found.get('doing', 'its start')}"
    elif code != 0 or outcome is None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        outcome, reason = "crashed", f"ended with {how}; last: {found.get('doing', 'its start')}"
    record = {"outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - began, 1)}
    record |= {"limit_s": round(limit_s, 1), "figures": found.get("figures", {})}
    if outcome not in ("passed", "skipped"):
        record["log"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return record


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Returns the exit status, or None after the limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """Kills the process, its group, and every process whose environment has the token."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ends = time.monotonic() + 5
    while (left := list(_marked(f"{_MARK}={token}".encode()))) and time.monotonic() < ends:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(entry: bytes) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if entry in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
