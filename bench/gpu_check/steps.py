"""Measures the parts of a decode step: scheduling, host and device time of the model, sampling, delivery.

The engine's core runs on this thread, step by step. Times are measured without a profiler. A profiler then counts the
kernels and their launches.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_check import models
from bench.gpu_check.machine import synchronize
from serve_app.contracts.generation import SamplingParams
from serve_app.engine.config import EngineSettings
from serve_app.engine.core import EngineCore
from serve_app.engine.delivery import LoopSink, Outbox
from serve_app.engine.output_stream import OutputStream
from serve_app.engine.request import GenerationRequest
from serve_app.engine.scheduling.sequence import TokenSequence
from serve_app.engine.text.detokenizer import Vocabulary

WARM, TIMED, PROFILED = 10, 40, 8  # steps
TOP: Final = 8
PARTS = ("plan", "launch", "wait", "sample", "commit")


class Steps:
    """Some sequences that decode together."""

    def __init__(self, runner: Any, settings: EngineSettings, count: int, device: torch.device) -> None:
        self._device = device
        self._execute, self._runner = runner.execute, runner
        self._loop = asyncio.new_event_loop()  # receives the engine's events, but never runs
        self._outbox = Outbox(lambda request_id: None)
        runner.execute = self._timed
        self._core = EngineCore(runner, settings, self._outbox)
        vocabulary = Vocabulary(models.make_tokenizer(runner.vocab_size))
        params = SamplingParams(max_tokens=1000, temperature=0.0)
        for number, prompt in enumerate(models.prompts(runner.vocab_size, [models.PROMPT] * count)):
            sequence = TokenSequence(GenerationRequest(str(number), tuple(prompt), params), number, 0.0, 1000)
            sink = LoopSink(self._loop)
            self._core.add(OutputStream(sequence, vocabulary, runner.vocab_size, frozenset(), sink))
        self._host = self._waited = 0.0
        for _ in itertools.count():  # until all prompts are computed
            if self.run()["tokens"] == count and all(s.is_decoding for s in self._core.streams):
                break

    def run(self) -> dict[str, float]:
        """Runs one step. Returns the seconds of its parts.

        `launch` is the time of the model's code on the host, `wait` the time from then until the device has finished.
        """
        began = time.perf_counter()
        plan = self._core.plan(0.0)
        streams = [self._core.streams[chunk.sequence] for chunk in plan.chunks]
        planned = time.perf_counter()
        sampled = self._core.compute(plan, streams)
        computed = time.perf_counter()
        self._core.commit(plan, sampled, computed - planned)
        self._outbox.deliver()
        ended = time.perf_counter()
        sample = computed - planned - self._host - self._waited
        parts = (planned - began, self._host, self._waited, sample, ended - computed)
        return {**dict(zip(PARTS, parts, strict=True)), "all": ended - began, "tokens": plan.num_tokens}

    def close(self) -> None:
        """Restores the runner."""
        self._runner.execute = self._execute
        self._loop.close()

    def _timed(self, chunks: Any) -> torch.Tensor:
        began = time.perf_counter()
        logits: torch.Tensor = self._execute(chunks)
        returned = time.perf_counter()
        synchronize(self._device)
        self._host, self._waited = returned - began, time.perf_counter() - returned
        return logits


def measure_steps(runner: Any, settings: EngineSettings, count: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the parts of a step with `count` sequences, and its kernels."""
    steps = Steps(runner, settings, count, device)
    try:
        for _ in range(WARM):
            steps.run()
        seconds = [steps.run() for _ in range(TIMED)]
        figures: dict[str, Any] = {
            f"{part}_ms": round(1e3 * fmean(one[part] for one in seconds), 4) for part in (*PARTS, "all")
        }
        figures |= kernels(steps.run, device)
    finally:
        steps.close()
    if figures.get("kernel_ms"):
        # Estimated step time with a CUDA graph, which replays all launches as one: time in kernels plus other work.
        rest = figures["all_ms"] - figures["launch_ms"] - figures["wait_ms"]
        figures["replayed_ms"] = round(rest + figures["kernel_ms"], 4)
    return figures


def kernels(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Returns per step: kernels and their time, driver calls and their host time, and torch operations."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            step()
    rows = profiler.key_averages()
    on_device = [r for r in rows if "CUDA" in str(r.device_type)]
    on_host = [r for r in rows if "CUDA" not in str(r.device_type)]
    calls = [r for r in on_host if r.key.startswith(("cuda", "cu")) and "::" not in r.key]
    operations = [r for r in on_host if r.key.startswith("aten::")]
    launches = [r for r in calls if "Launch" in r.key]

    def per_step(chosen: list[Any], time_of: Callable[[Any], float]) -> float:
        return round(sum(map(time_of, chosen)) / PROFILED / 1e3, 4)

    def device_us(row: Any) -> float:
        return float(row.self_device_time_total)

    def host_us(row: Any) -> float:
        return float(row.self_cpu_time_total)

    def top(chosen: list[Any], time_of: Callable[[Any], float]) -> list[dict[str, Any]]:
        heaviest = sorted(chosen, key=time_of, reverse=True)[:TOP]
        return [{"name": r.key[:90], "count": r.count / PROFILED, "ms": per_step([r], time_of)} for r in heaviest]

    found: dict[str, Any] = {"operations": sum(r.count for r in operations) / PROFILED}
    found["top_operations"] = top(operations, host_us)
    if on_device:
        found |= {"kernels": sum(r.count for r in on_device) / PROFILED, "kernel_ms": per_step(on_device, device_us)}
        found |= {"launches": sum(r.count for r in launches) / PROFILED, "driver_ms": per_step(launches, host_us)}
        found |= {"top_kernels": top(on_device, device_us), "top_calls": top(calls, host_us)}
    return found
