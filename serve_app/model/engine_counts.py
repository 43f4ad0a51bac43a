"""Exports an engine's statistics as metrics."""

from __future__ import annotations

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric, Metrics
from serve_app.engine.port import EngineStats

GAUGES: dict[Metric, str] = {
    metrics.RUNNING: "running",
    metrics.WAITING: "waiting",
    metrics.OLDEST_WAIT: "oldest_wait_s",
    metrics.QUEUED_PREFILL: "queued_prefill_tokens",
    metrics.KV_BLOCKS_USED: "kv_blocks_used",
    metrics.KV_BLOCKS_CACHED: "kv_blocks_cached",
    metrics.KV_BLOCKS_TOTAL: "kv_blocks_total",
}
COUNTERS: dict[Metric, str] = {
    metrics.ENGINE_STEPS: "steps",
    metrics.ENGINE_STEP_SECONDS: "step_seconds",
    metrics.ENGINE_STEP_ROWS: "step_sequences",
    metrics.ENGINE_PROMPT_TOKENS: "prompt_tokens",
    metrics.ENGINE_OUTPUT_TOKENS: "tokens_produced",
    metrics.PREFIX_HITS: "prefix_hit_tokens",
    metrics.PREEMPTIONS: "preemptions",
    metrics.DRAFTED: "drafted",
    metrics.ACCEPTED: "accepted",
}


class EngineCounts:
    """Exports the statistics of one engine. Its counters begin when it starts, as Prometheus' counters do."""

    def __init__(self, exported: Metrics) -> None:
        self._exported = exported
        self._known: dict[Metric, float] = dict.fromkeys(COUNTERS, 0)
        exported.export_zeros(COUNTERS)

    def export(self, stats: EngineStats) -> None:
        for gauge, field in GAUGES.items():
            self._exported.set(gauge, getattr(stats, field))
        for counter, field in COUNTERS.items():
            value = getattr(stats, field)
            if value > self._known[counter]:
                self._exported.add(counter, value - self._known[counter])
                self._known[counter] = value
