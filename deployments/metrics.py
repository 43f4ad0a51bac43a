"""Exports metrics through Ray's metrics API. Sums the counters between two flushes.

A call into Ray's metrics takes a lock that Ray's exporter sometimes holds. Without the sums, requests would wait for
this lock, and the path around the model (docs/benchmarks.md) would handle a fifth fewer requests per second. A
process that dies loses the metrics of its last half second. This is harmless, because nothing is billed from metrics.

Ray exports a gauge only if it was set since the last export (ray 2.60). So each gauge is set again before each export.

Histograms are counted here and exported as gauges with Prometheus' names. Ray's histograms (2.60) process each value
separately and twice, the second time in Python in Ray's agent. They also export each value as the middle of its bucket,
which makes the sums wrong.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import inf
from typing import Any, Final

from ray.serve.metrics import Counter, Gauge

from serve_app.contracts.metric import Metric

FLUSH_S: Final = 0.5
# Gauges are set again at half of Ray's export interval.
REPEAT_S: Final = float(os.environ.get("RAY_metrics_report_interval_ms", "10000")) / 2000  # noqa: SIM112

Row = tuple[Metric, tuple[str, ...]]


class RayMetrics:
    """Implements the port `contracts.metric.Metrics`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._made: dict[Metric, Any] = {}
        self._sums: dict[Row, float] = {}
        self._histograms: dict[Row, _Buckets] = {}
        self._changed: set[Row] = set()  # rows of histograms to export with the next flush
        self._gauges: dict[Row, float] = {}
        self._is_due = False
        self._repeats = False

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        key = counter, labels
        self._sums[key] = self._sums.get(key, 0) + value
        self._schedule()

    def observe(self, histogram: Metric, value: float, *labels: str) -> None:
        row = histogram, labels
        buckets = self._histograms.get(row)
        if buckets is None:
            buckets = self._histograms[row] = _Buckets(histogram)
        buckets.add(value)
        self._changed.add(row)
        self._schedule()

    def set(self, gauge: Metric, value: float, *labels: str) -> None:
        self._gauges[gauge, labels] = value
        self._ray(gauge).set(value, dict(zip(gauge.labels, labels, strict=True)))
        if not self._repeats:
            self._repeats = True
            self._later(REPEAT_S, self._repeat_gauges)

    def export_zeros(self, declared: Iterable[Metric], served: Iterable[Mapping[str, str]] = ({},)) -> None:
        served = list(served)
        for metric in declared:
            for labels in metric.rows(served) if metric.kind != "gauge" else ():
                if metric.kind == "counter":
                    _record_zero(self._ray(metric), dict(zip(metric.labels, labels, strict=True)))
                elif (metric, labels) not in self._histograms:
                    self._histograms[metric, labels] = _Buckets(metric)
                    self._changed.add((metric, labels))
                    self._schedule()

    def flush_metrics(self) -> None:
        """Passes the collected values to Ray now."""
        sums, self._sums = self._sums, {}
        changed, self._changed = self._changed, set()
        self._is_due = False
        for (counter, labels), value in sums.items():
            self._ray(counter).inc(value, dict(zip(counter.labels, labels, strict=True)))
        for row in changed:
            for gauge, value, *more in self._histograms[row].series():
                labels = (*row[1], *more)
                if self._gauges.get((gauge, labels)) != value:  # most buckets do not change
                    self.set(gauge, value, *labels)

    def _repeat_gauges(self) -> None:
        self._repeats = False
        for (gauge, labels), value in list(self._gauges.items()):
            self.set(gauge, value, *labels)

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._later(FLUSH_S, self.flush_metrics)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules `call` outside the current request's context. In it, Ray would add the request's route as a tag."""
        asyncio.get_running_loop().call_later(delay_s, call, context=contextvars.Context())

    def _ray(self, metric: Metric) -> Any:
        made = self._made.get(metric)
        if made is None:
            made = self._made[metric] = _make(metric)
        return made


def _record_zero(counter: Any, tags: dict[str, str]) -> None:
    # Ray's `inc` rejects 0, and there is no other public method. Tags that Serve adds to requests stay empty.
    missing = set(counter.info["tag_keys"]) - counter.info["default_tags"].keys() - tags.keys()
    counter._record(0, dict.fromkeys(missing, "") | tags)


class _Buckets:
    """Counts the values of one row of a histogram."""

    def __init__(self, histogram: Metric) -> None:
        self._bounds = histogram.buckets
        self._counts = [0] * (len(histogram.buckets) + 1)
        self._sum = 0.0
        self._bucket, self._sum_of, self._count = _gauges(histogram)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def series(self) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
        """Yields each gauge with its value and, for a bucket, its label, as Prometheus defines them."""
        below = 0
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            below += count
            yield self._bucket, below, "+Inf" if bound == inf else f"{bound:g}"
        yield self._sum_of, self._sum
        yield self._count, below


@cache
def _gauges(histogram: Metric) -> tuple[Metric, Metric, Metric]:
    bucket, total, count = (
        Metric("gauge", f"{histogram.name}_{suffix}", histogram.unit, histogram.description, (*histogram.labels, *more))
        for suffix, more in (("bucket", ("le",)), ("sum", ()), ("count", ()))
    )
    return bucket, total, count


def _make(metric: Metric) -> Any:
    return (Counter if metric.kind == "counter" else Gauge)(metric.name, metric.description, metric.labels)
