"""Generates docs/metrics.md from the declarations of the service's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

PATH = Path("docs/metrics.md")
GROUPS: Sequence[tuple[str, Sequence[Metric]]] = (
    ("Gateways", metrics.OF_GATEWAYS),
    ("Spools of gateways and replicas", metrics.OF_SPOOLS),
    ("Limiters", metrics.OF_LIMITERS),
    ("Accounting", metrics.OF_ACCOUNTING),
    ("Model replicas", metrics.OF_REPLICAS),
)
INTRODUCTION = (
    "This page lists all metrics of the service. `python -m dashboards` generates it from "
    "`serve_app/contracts/metrics.py`. [observing.md](observing.md) explains how to scrape the metrics."
)
NOTES = (
    "Names are as in Prometheus. Each histogram is exported as series with `_bucket`, `_sum` and `_count` after its "
    "name. These series have the type gauge: Ray's own histograms would export only estimated sums.",
    "Ray adds `application`, `deployment`, `replica` and its own labels; the scrape configuration adds `cluster` and "
    "`namespace`.",
    "The label `model` is the identifier that the client named, and `backend` is the application that served the "
    "request. Each is `none` if the request was refused before it was known. No label contains an account or a key.",
    "The service's counters and histograms are exported as 0 before their first event, for each combination of their "
    "labels' values. Without this, Prometheus's `increase` would miss the first event.",
    "Counters are reset to 0 when a process restarts. Do not bill from metrics: only the ledger is exact.",
)
OWN = (
    "A replica on vLLM also exports vLLM's own metrics, about 600 series per replica. Their names have the prefix "
    "`ray_vllm_` in place of `vllm:`, for example `ray_vllm_time_to_first_token_seconds_bucket`. [vLLM's "
    "documentation](https://docs.vllm.ai/en/latest/usage/metrics.html) describes them. The replica reads them from "
    "vLLM every 5 s. It leaves out metrics that only show configuration (`…_info`). vLLM's metrics of waiting "
    "requests are nearly always 0, because requests wait in the service's queue: use "
    "`ray_serve_app_waiting_sequences` instead."
)
TABLE = "| metric | kind | unit | labels | description |\n|---|---|---|---|---|"


def page() -> str:
    notes = "\n".join(f"- {note}" for note in NOTES)
    sections = [f"# Metrics\n\n{INTRODUCTION}\n\n{notes}\n"]
    for title, declared in GROUPS:
        rows = "\n".join(_row(metric) for metric in declared)
        sections.append(f"## {title}\n\n{TABLE}\n{rows}\n")
    sections.append(f"## vLLM\n\n{OWN}\n")
    return "\n".join(sections)


def _row(metric: Metric) -> str:
    labels = ", ".join(_label(metric, label) for label in metric.labels)
    return f"| `{metric.exported}` | {metric.kind} | {metric.unit} | {labels} | {metric.description} |"


def _label(metric: Metric, label: str) -> str:
    known = metric.known.get(label)
    return f"{label} ({', '.join(known)})" if known else label


def files() -> dict[Path, str]:
    return {PATH: page()}
