"""Metrics through Ray's own. What is counted between two flushes is summed here.

A call into Ray's metrics takes a lock that its exporter holds now and then, in the middle of a request: without the
sums, the path around the model does a fifth fewer requests a second (docs/benchmarks.md). A process that dies takes
the last half a second with it, which is no harm: nothing is billed from metrics.

Ray exports a gauge only if it was set since the last export (ray 2.60), so each is set again every second.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ray.serve.metrics import Counter, Gauge, Histogram

from serve_app.contracts.metric import Metric

FLUSH_S: Final = 0.5
REPEAT_S: Final = 1.0  # the shortest time between two exports


class RayMetrics:
    """The port `contracts.metric.Metrics`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._made: dict[Metric, Any] = {}
        self._sums: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._values: dict[tuple[Metric, tuple[str, ...]], list[float]] = {}
        self._gauges: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._is_due = False
        self._repeats = False

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        key = counter, labels
        self._sums[key] = self._sums.get(key, 0) + value
        self._schedule()

    def observe(self, histogram: Metric, value: float, *labels: str) -> None:
        self._values.setdefault((histogram, labels), []).append(value)
        self._schedule()

    def set(self, gauge: Metric, value: float, *labels: str) -> None:
        self._gauges[gauge, labels] = value
        self._ray(gauge).set(value, dict(zip(gauge.labels, labels, strict=True)))
        if not self._repeats:
            self._repeats = True
            self._later(REPEAT_S, self._repeat_gauges)

    def export_zeros(self, declared: Iterable[Metric], served: Iterable[Mapping[str, str]] = ({},)) -> None:
        served = list(served)
        for counter in declared:
            if counter.kind == "counter":
                for labels in counter.rows(served):
                    _record_zero(self._ray(counter), dict(zip(counter.labels, labels, strict=True)))

    def flush_metrics(self) -> None:
        """Hands Ray what was gathered, now."""
        sums, self._sums = self._sums, {}
        values, self._values = self._values, {}
        self._is_due = False
        for (counter, labels), value in sums.items():
            self._ray(counter).inc(value, dict(zip(counter.labels, labels, strict=True)))
        for (histogram, labels), observed in values.items():
            tags = dict(zip(histogram.labels, labels, strict=True))
            for value in observed:
                self._ray(histogram).observe(value, tags)

    def _repeat_gauges(self) -> None:
        self._repeats = False
        for (gauge, labels), value in list(self._gauges.items()):
            self.set(gauge, value, *labels)

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._later(FLUSH_S, self.flush_metrics)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Outside of the context of the request that is served now: Ray would name its route as a tag."""
        asyncio.get_running_loop().call_later(delay_s, call, context=contextvars.Context())

    def _ray(self, metric: Metric) -> Any:
        made = self._made.get(metric)
        if made is None:
            made = self._made[metric] = _make(metric)
        return made


def _record_zero(counter: Any, tags: dict[str, str]) -> None:
    # Ray's `inc` refuses 0 and has no other way. Serve's tags of a request are empty, as those of a flush.
    missing = set(counter.info["tag_keys"]) - counter.info["default_tags"].keys() - tags.keys()
    counter._record(0, dict.fromkeys(missing, "") | tags)


def _make(metric: Metric) -> Any:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.description, list(metric.buckets), metric.labels)
    return (Counter if metric.kind == "counter" else Gauge)(metric.name, metric.description, metric.labels)
