"""Defines metrics and the interface that records their values. `contracts.metrics` declares all metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Literal, Protocol

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. Its exported name has the prefix `ray_`, and for a counter the suffix `_total`."""

    kind: Literal["counter", "histogram", "gauge"]
    name: str
    unit: str  # "seconds", "tokens", "bytes", "units of currency", "share" (0 to 1), or the counted objects
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS  # upper bounds; histograms only
    # All values of each label that has a fixed set of values. A counter is exported as 0 for each of them from the
    # start. Otherwise Prometheus's `increase` would miss the first event.
    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # must be fast: each request looks up several metrics

    @property
    def exported(self) -> str:
        """The name in Prometheus. A histogram's series append `_bucket`, `_sum` or `_count`."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")

    def rows(self, served: Iterable[Mapping[str, str]] = ({},)) -> list[tuple[str, ...]]:
        """Returns the rows of label values for the items of `served`.

        An item gives the values of some labels. Each other label takes all of its values in `known`.
        """
        found: dict[tuple[str, ...], None] = {}
        for given in served:
            values = [(given[label],) if label in given else self.known[label] for label in self.labels]
            found.update(dict.fromkeys(product(*values)))
        return list(found)


class Metrics(Protocol):
    """Records metric values. `labels` are values in the order of the metric's labels."""

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        """Adds `value`, which is above 0."""

    def observe(self, histogram: Metric, value: float, *labels: str) -> None: ...

    def set(self, gauge: Metric, value: float, *labels: str) -> None: ...

    def export_zeros(self, declared: Iterable[Metric], served: Iterable[Mapping[str, str]] = ({},)) -> None:
        """Exports counters and histograms as 0 before their first event, for each of `Metric.rows(served)`."""
