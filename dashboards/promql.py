"""Builds expressions over declared metrics. `by` and `where` are the contents of brackets: `where='status=~"5.."'`."""

from __future__ import annotations

import re
from typing import Final

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

SHOWN: Final = "$__rate_interval"  # window of a rate in a graph; it depends on the graph's step
NOW: Final = "5m"  # window of a rate in single stats, independent of the board's time range
ALL_SHOWN: Final = "$__range"
SERVICE: Final = "cluster, namespace"
REPLICA: Final = "application, replica"
MODELS: Final = 'deployment="Model", application=~"$backend"'  # selects model replicas in Ray's metrics

# Variable of a board by the label whose values it selects.
VARIABLES: Final = {
    "cluster": "$cluster",
    "namespace": "$namespace",
    "model": "$identifier",
    "backend": "($backend)(:.+)?",  # also matches the application's adapters, such as `qwen:law`
    "application": "$backend",
}


def select(metric: Metric, where: str = "", suffix: str = "") -> str:
    """Selects a metric's series by the board's variables. For a label in `where`, only `where` applies."""
    labels = ["cluster", "namespace", *(label for label in ("model", "backend") if label in metric.labels)]
    if metric in metrics.OF_REPLICAS:
        labels.append("application")
    named = re.findall(r"(\w+) *[=!]", where)
    matchers = [f'{label}=~"{VARIABLES[label]}"' for label in labels if label not in named]
    return f"{metric.exported}{suffix}{{{', '.join([*matchers, *([where] if where else [])])}}}"


def rate_of(counter: Metric, by: str = "", where: str = "", over: str = SHOWN) -> str:
    return _grouped("sum", by, f"rate({select(counter, where)}[{over}])")


def increase_of(counter: Metric, by: str = "", where: str = "", over: str = SHOWN) -> str:
    return _grouped("sum", by, f"increase({select(counter, where)}[{over}])")


def quantile(of: float, histogram: Metric, by: str = "", where: str = "", over: str = SHOWN) -> str:
    buckets = f"rate({select(histogram, where, '_bucket')}[{over}])"
    return f"histogram_quantile({of}, {_grouped('sum', f'le, {by}' if by else 'le', buckets)})"


def quantiles(histogram: Metric, by: str = "", where: str = "") -> dict[str, str]:
    """Returns expressions for p50, p95 and p99, by legend."""
    legend = "".join(f" {{{{{label.strip()}}}}}" for label in by.split(",") if label)
    return {f"p{of * 100:.0f}{legend}": quantile(of, histogram, by, where) for of in (0.5, 0.95, 0.99)}


def total(gauge: Metric, by: str = "", where: str = "") -> str:
    return _grouped("sum", by, select(gauge, where))


def most(gauge: Metric, by: str = "", where: str = "") -> str:
    return _grouped("max", by, select(gauge, where))


def least(gauge: Metric, by: str = "", where: str = "") -> str:
    return _grouped("min", by, select(gauge, where))


def share(part: str, whole: str) -> str:
    """Returns an expression that has no value where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def or_zero(expression: str) -> str:
    """Returns the expression with 0 instead of no value, for metrics that are exported only while above 0."""
    return f"({expression} or vector(0))"


def _grouped(operator: str, by: str, expression: str) -> str:
    return f"{operator} by ({by}) ({expression})" if by else f"{operator}({expression})"
