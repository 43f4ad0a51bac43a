"""Adds up the statistics that vLLM reports after each step, and reads vLLM's own metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.engine.port import Sample


class StepCounts(StatLoggerBase):
    """Counters since the start. vLLM calls `record` on the loop that it runs on.

    `on_step` is called after each step, even if the step has no output.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self.steps = 0
        self.step_seconds = 0.0  # time between the ends of two steps, if sequences still ran after the first one
        self.step_sequences = 0
        self._ended_at: float | None = None  # end of the last step, if sequences still ran
        self.tokens_produced = 0
        self.preemptions = 0
        self.kv_usage = 0.0  # share of the KV cache in use after the last step, 0 to 1

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.steps += 1
        self.on_step()
        now = time.monotonic()
        if self._ended_at is not None:
            self.step_seconds += now - self._ended_at
        self._ended_at = None
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.step_sequences += scheduler_stats.num_running_reqs
            self._ended_at = now if scheduler_stats.num_running_reqs else None
        if iteration_stats is not None:
            self.tokens_produced += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing: the replica reports when it is ready."""


def own_metrics() -> Iterator[Sample]:
    """Yields vLLM's metrics, which it counts in this process with Prometheus' client.

    The series of a histogram become gauges. Metrics whose labels only hold configuration are left out.
    """
    for family in REGISTRY.collect():
        if not family.name.startswith("vllm:") or family.name.endswith("_info"):
            continue
        is_counter = family.type == "counter"
        for name, labels, value, *_ in family.samples:
            if name.endswith("_created"):  # the time at which the series was created
                continue
            plain = (family.name if is_counter else name).replace(":", "_")
            yield Sample("counter" if is_counter else "gauge", plain, family.documentation, labels, value)
