"""The figures of gateways that a live view needs, however they are read, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

WINDOW_S: Final = 60.0  # over which rates are taken

#: What is read, and by which labels.
COUNTED: Final[Mapping[Metric, tuple[str, ...]]] = {
    metrics.REQUESTS: ("model", "backend"),
    metrics.REFUSALS: ("model", "reason"),
    metrics.FIRST_TOKEN_SECONDS: ("model", "backend", "le"),
    metrics.PROMPT_TOKENS: ("model", "backend"),
    metrics.COMPLETION_TOKENS: ("model", "backend"),
}


def series_of(metric: Metric) -> str:
    """The name of the series whose rates are taken."""
    return metric.exported + ("_bucket" if metric.kind == "histogram" else "")


@dataclass(frozen=True)
class Rates:
    """Rates per second by the labels of COUNTED, over `over_s` seconds. `values` is None while there are none.

    `source` says what was read, and `notes` what an operator should know of it; neither holds a password.
    """

    source: str = ""
    values: Mapping[Metric, Mapping[tuple[str, ...], float]] | None = None
    over_s: float | None = None
    notes: tuple[str, ...] = field(default=())

    def of(self, counter: Metric, *wanted: str | None) -> float | None:
        """The rate of these labels together; None stands for any value of a label."""
        if self.values is None:
            return None
        return sum((rate for labels, rate in self.values.get(counter, {}).items() if _match(labels, wanted)), 0.0)

    def by_last(self, counter: Metric, *wanted: str | None) -> dict[str, float]:
        """Rates by the last label, for these values of the labels before it; the highest first."""
        found: dict[str, float] = {}
        for labels, rate in (self.values or {}).get(counter, {}).items():
            if _match(labels[:-1], wanted):
                found[labels[-1]] = found.get(labels[-1], 0.0) + rate
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))

    def quantile(self, of: float, histogram: Metric, *wanted: str | None) -> float | None:
        """Of what was observed with these labels; None when nothing was."""
        return quantile(of, {float(le): rate for le, rate in self.by_last(histogram, *wanted).items()})


class Source(Protocol):
    """Where figures of gateways come from."""

    first_after_s: float  # a read has no rates before another one that is so long ago

    def read(self) -> Rates:
        """Never raises: a live view goes on without them, and its notes say why."""


class NoSource:
    """Where no source was named."""

    first_after_s = 0.0

    def read(self) -> Rates:
        return Rates(notes=("for requests/s, refusals/s, TTFT and tokens/s give --prometheus URL or --metrics URL",))


def quantile(of: float, buckets: Mapping[float, float]) -> float | None:
    """Of a histogram with cumulative rates by upper bound, among them infinity; None of an empty one.

    As Prometheus's `histogram_quantile`: values lie evenly within a bucket, and above the highest finite bound they
    count as that bound.
    """
    whole = buckets.get(inf, 0.0)
    if whole <= 0:
        return None
    rank = of * whole
    below, start = 0.0, 0.0
    for bound, rate in sorted(buckets.items()):
        if rate >= rank:
            return start if bound == inf else start + (bound - start) * (rank - below) / (rate - below)
        below, start = rate, bound
    return start


def _match(labels: Iterable[str], wanted: tuple[str | None, ...]) -> bool:
    # Of labels that nothing is said of, any value is right.
    return all(want is None or label == want for label, want in zip(labels, wanted, strict=False))
