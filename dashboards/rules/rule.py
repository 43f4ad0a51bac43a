"""Rules, and their form in a Prometheus file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dashboards.promql import SERVICE
from serve_app.contracts.metric import Metric

RUNBOOKS: Final = "docs/runbooks.md"  # or the address under which you publish that file


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus computes in advance. Names are level:metric:operation."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        labels = {"labels": dict(self.labels)} if self.labels else {}
        return {"record": self.name, "expr": self.expr, **labels}


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires while `expr` has a value. `page` wakes someone up; `warn` can wait until morning."""

    name: str
    severity: Literal["page", "warn"]
    expr: str
    summary: str  # may have Prometheus templates, like the description
    description: str  # what it means for users
    lasts: str = ""  # how long the condition must hold
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def runbook_url(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.lasts} if self.lasts else {}),
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.runbook_url,
            },
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in this order."""

    name: str
    rules: tuple[Recording | Alert, ...]
    interval: str = "30s"

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "interval": self.interval, "rules": [rule.document() for rule in self.rules]}


def selector(metric: Metric, where: str = "", suffix: str = "") -> str:
    """Returns a selector of a metric's series. `where` is the content of PromQL's braces."""
    return f"{metric.exported}{suffix}" + (f"{{{where}}}" if where else "")


def quantile_99(histogram: Metric, by: str = SERVICE) -> str:
    """Returns an expression for the p99 of the last five minutes."""
    return f"histogram_quantile(0.99, sum by ({by}, le) (rate({selector(histogram, suffix='_bucket')}[5m])))"
