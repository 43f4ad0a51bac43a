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
    "Made by `python -m dashboards` from `serve_app/contracts/metrics.py`. How to scrape them: "
    "[observing.md](observing.md)."
)
NOTES = (
    "Names are as in Prometheus. A histogram has `_bucket`, `_sum` and `_count` after its name, and is exported as "
    "gauges, because sums of Ray's own histograms are estimates.",
    "Ray adds `application`, `deployment`, `replica` and its own labels; the scrape adds `cluster` and `namespace`. "
    "`model` is the identifier that clients name, `backend` the application that serves it; both are `none` for a "
    "request that is refused before they are known. No label is an account or a key.",
    "A counter or histogram is exported as 0 for each value of its labels from the start, so that `increase` sees its "
    "first event.",
    "Counters start at 0 with each process. Do not bill from metrics: the ledger is authoritative.",
)
OWN = (
    "A replica on vLLM also exports vLLM's own metrics, with `ray_vllm_` in place of `vllm:`: for example "
    "`ray_vllm_time_to_first_token_seconds_bucket`, about 600 series per replica. [vLLM's documentation]"
    "(https://docs.vllm.ai/en/latest/usage/metrics.html) describes them. Replicas read them every 5 s. vLLM's queue is "
    "nearly empty, because requests wait in the service's queue: waiting requests are in the table above. Metrics that "
    "only show configuration (`…_info`) are left out."
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
