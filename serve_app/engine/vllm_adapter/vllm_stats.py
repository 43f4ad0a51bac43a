"""What vLLM reports after each step, added up."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class StepCounts(StatLoggerBase):
    """Counters run from the start. vLLM calls `record` on the loop that it runs on."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens_produced = 0
        self.preemptions = 0
        self.kv_usage = 0.0  # 0 to 1, after the last step

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.tokens_produced += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to log: the replica says when it is ready."""
