"""Exports an engine's statistics as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric, Metrics
from serve_app.engine.port import EngineStats, Sample

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
    """Exports the statistics of one engine. The counters start at 0 when the engine starts."""

    def __init__(self, exported: Metrics) -> None:
        self._exported = exported
        self._known: dict[Metric, float] = dict.fromkeys(COUNTERS, 0)
        self._own: dict[str, Metric] = {}  # the engine's own metrics, by name
        self._sampled: dict[tuple[str, tuple[str, ...]], float] = {}  # last values, by name and label values
        exported.export_zeros(COUNTERS)

    def export(self, stats: EngineStats) -> None:
        for gauge, field in GAUGES.items():
            self._exported.set(gauge, getattr(stats, field))
        for counter, field in COUNTERS.items():
            value = getattr(stats, field)
            if value > self._known[counter]:
                self._exported.add(counter, value - self._known[counter])
                self._known[counter] = value

    def export_samples(self, samples: Iterable[Sample]) -> None:
        """Exports the engine's own metrics under their names."""
        for sample in samples:
            metric = self._own.get(sample.name)
            if metric is None:
                metric = Metric(sample.kind, sample.name, "", sample.description, tuple(sample.labels))
                self._own[sample.name] = metric
            labels = tuple(sample.labels[label] for label in metric.labels)
            before = self._sampled.get((sample.name, labels))
            if sample.value == before:
                continue
            self._sampled[sample.name, labels] = sample.value
            if sample.kind == "gauge":
                self._exported.set(metric, sample.value, *labels)
                continue
            if before is None:
                self._exported.export_zeros([metric], [sample.labels])
            if sample.value > (before or 0):
                self._exported.add(metric, sample.value - (before or 0), *labels)
