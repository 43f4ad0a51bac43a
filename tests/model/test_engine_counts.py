"""Tests that an engine's reports reach the metrics: gauges unchanged, counters by their increase."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric
from serve_app.engine.port import EngineStats, Sample
from serve_app.model.engine_counts import COUNTERS, GAUGES, EngineCounts

STATS = EngineStats(**{field.name: number for number, field in enumerate(fields(EngineStats), 1)})


class Exported:
    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.rows: list[tuple[str, float, tuple[str, ...]]] = []  # gauges with labels, each time they are set
        self.zeros: list[str] = []

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        assert value > 0
        self.counted[counter.name] += value  # type: ignore[assignment]

    def set(self, gauge: Metric, value: float, *labels: str) -> None:
        self.gauges[gauge.name] = value
        self.rows.append((gauge.name, value, labels))

    def observe(self, histogram: Metric, value: float, *labels: str) -> None: ...

    def export_zeros(self, declared: Any, served: Any = ()) -> None:
        self.zeros += [counter.name for counter in declared]


def test_counters_rise_by_what_the_engine_did() -> None:
    exported = Exported()
    counts = EngineCounts(exported)
    assert set(exported.zeros) == {counter.name for counter in COUNTERS}
    for stats in (STATS, STATS, replace(STATS, steps=STATS.steps + 4)):
        counts.export(stats)
    assert exported.counted[metrics.ENGINE_STEPS.name] == STATS.steps + 4
    assert exported.counted[metrics.PREEMPTIONS.name] == STATS.preemptions
    assert exported.gauges[metrics.WAITING.name] == STATS.waiting


def test_every_metric_of_an_engine_is_exported_and_every_field_is_used() -> None:
    own = {metrics.LOAD_SECONDS, metrics.REPLICA_COST}  # the replica's
    assert {*GAUGES, *COUNTERS} == set(metrics.OF_REPLICAS) - own
    assert {*GAUGES.values(), *COUNTERS.values()} == {field.name for field in fields(EngineStats)}


def test_the_engines_own_metrics_are_exported_when_they_change() -> None:
    exported = Exported()
    counts = EngineCounts(exported)
    bucket = [Sample("gauge", "vllm_wait_bucket", "", {"engine": "0", "le": bound}, 1) for bound in ("0.1", "+Inf")]
    for tokens in (0, 0, 7, 9):
        counts.export_samples([Sample("counter", "vllm_tokens", "", {"engine": "0"}, tokens), *bucket])
    assert exported.counted["vllm_tokens"] == 9
    assert exported.zeros.count("vllm_tokens") == 1
    assert exported.rows == [("vllm_wait_bucket", 1, ("0", "0.1")), ("vllm_wait_bucket", 1, ("0", "+Inf"))]
