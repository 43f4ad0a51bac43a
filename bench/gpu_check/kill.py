"""Kills processes with SIGKILL while they generate on the GPU, and measures the time until their memory is free.

The first case is a single process with an engine. The second is a group of two processes: its leader is killed first,
then the whole group. The leader represents a replica whose engine runs in a child process.
`python -m bench.gpu_check.kill OPTIONS` runs one such process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_check.machine import nvidia_smi
from bench.gpu_check.part import Options, Report
from bench.gpu_check.parts import ROOT

SLACK = 64 * 2**20  # bytes of device memory that may stay in use
PATIENCE_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def run(options: Options, report: Report) -> None:
    """Runs both cases."""
    shape = "1b" if "1b" in options.shapes else options.shapes[0]
    memory = Memory(options)
    report.add(shape=shape, measured="memory of the device" if options.on_gpu else "memory of the processes")
    report.doing("one process: its start")
    with started(options, shape, helper=False) as (process, ready_s):
        held = memory.used(process)
        report.add(one={"ready_s": ready_s, "held_gib": gib(held)})
        report.doing("one process: killed")
        report.add(one=kill(process, memory, lambda: os.kill(process.pid, signal.SIGKILL)))
    report.add(one={"nvidia_smi_after": nvidia_smi("memory.used")})
    report.doing("a group: its start")
    with started(options, shape, helper=True) as (process, ready_s):
        report.add(group={"ready_s": ready_s, "held_gib": gib(memory.used(process))})
        report.doing("a group: its leader killed")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(1)
        report.add(group={"held_after_leader_gib": gib(memory.used(process)), "child_survives": alive(process)})
        report.doing("a group: killed")
        report.add(group=kill(process, memory, lambda: os.killpg(process.pid, signal.SIGKILL)))
    report.add(group={"nvidia_smi_after": nvidia_smi("memory.used")})
    for name in ("one", "group"):
        if report.figures[name]["freed_s"] is None:
            report.problem(f"{name}: {report.figures[name]['left_gib']} GiB still in use after {PATIENCE_S:.0f} s")


class Memory:
    """Device memory in use, minus what was in use at the start. Without a GPU: resident memory of the processes."""

    def __init__(self, options: Options) -> None:
        self._on_gpu = options.on_gpu
        self.slack = SLACK if options.on_gpu else 0
        self._before = 0
        self._before = self.used(None)  # includes this process's CUDA context

    def used(self, process: subprocess.Popen[str] | None) -> int:
        """Returns the memory in use, in bytes."""
        if self._on_gpu:
            import torch

            free, total = torch.cuda.mem_get_info()
            return total - free - self._before
        if process is None:
            return 0
        return sum(_resident(pid) for pid in members(process.pid))


@contextlib.contextmanager
def started(options: Options, shape: str, *, helper: bool) -> Any:
    """Starts a process group that generates. Yields its leader and the seconds until the first tokens."""
    given = {"device": options.device, "shape": shape, "dtype": options.dtype, "helper": helper}
    began = time.monotonic()
    process = holder(given, start_new_session=True)
    try:
        await_ready(process)
        yield process, round(time.monotonic() - began, 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def holder(given: dict[str, Any], **more: Any) -> subprocess.Popen[str]:
    """Starts one process that loads a model and generates."""
    command = [sys.executable, "-m", "bench.gpu_check.kill", json.dumps(given)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, **more)


def await_ready(process: subprocess.Popen[str]) -> None:
    """Waits until the process is ready. Raises RuntimeError if it ends first."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return
    raise RuntimeError(f"the process ended with status {process.wait()} before it was killed; see the log")


def kill(process: subprocess.Popen[str], memory: Memory, by: Any) -> dict[str, Any]:
    """Measures the seconds until the processes have ended and until their memory is free; None: not in PATIENCE_S."""
    began = time.monotonic()
    by()
    ended = freed = None
    while time.monotonic() < began + PATIENCE_S and (ended is None or freed is None):
        process.poll()
        if ended is None and not alive(process):
            ended = round(time.monotonic() - began, 3)
        if freed is None and memory.used(process) <= memory.slack:
            freed = round(time.monotonic() - began, 3)
        time.sleep(0.005)
    return {"ended_s": ended, "freed_s": freed, "left_gib": gib(memory.used(process))}


def alive(process: subprocess.Popen[str]) -> bool:
    """Whether a process of the group runs."""
    return any(True for _ in members(process.pid))


def members(group: int) -> Any:
    """Ids of a group's processes, without zombies."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                yield int(path.parent.name)


def gib(size: int) -> float:
    """Converts bytes to GiB with three decimals."""
    return round(size / 2**30, 3)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def hold(device: str, shape: str, dtype: str, helper: bool) -> None:
    """Generates until it is killed. With `helper`, a child in the same group does the same."""
    child = holder({"device": device, "shape": shape, "dtype": dtype, "helper": False}) if helper else None
    import torch

    from bench.gpu_check import models

    model = models.make_model(shape, torch.device(device), getattr(torch, dtype))
    settings = models.engine_settings(dtype, kv_cache_memory="4GiB" if device != "cpu" else "64MiB")
    asked = models.prompts(model.config.vocab_size, [models.PROMPT] * 4)
    engine = models.make_engine(model, settings)
    models.generate(engine, asked, 8)
    if child is not None:
        await_ready(child)
    print("ready", flush=True)
    while True:
        models.generate(engine, asked, 64)


if __name__ == "__main__":
    hold(**json.loads(sys.argv[1]))
