"""Which metrics there are, and which ones the dashboard and the alerts name. The service tests import both.

A service that has handled requests exports all `own_metrics()`. The dashboard and the alerts use `dashboard_metrics()`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from serve_app.contracts import metrics

DASHBOARDS = Path(__file__).parents[2] / "dashboards"

OWN = {one.name: str(one.kind) for one in vars(metrics).values() if isinstance(one, metrics.Metric)}
# Ray's, as its sources name them.
RAYS = {
    "serve_num_http_requests": "counter",
    "serve_num_http_error_requests": "counter",
    "serve_deployment_error_counter": "counter",
    "serve_deployment_replica_starts": "counter",
    "serve_deployment_replica_healthy": "gauge",
    "serve_deployment_queued_queries": "gauge",
    "serve_replica_processing_queries": "gauge",
    "serve_autoscaling_target_replicas": "gauge",
    "serve_autoscaling_desired_replicas": "gauge",
    "serve_event_loop_scheduling_latency_ms": "histogram",
    "serve_haproxy_process_count": "gauge",
    "serve_haproxy_target_mismatch": "gauge",
    "node_gpus_utilization": "gauge",
    "node_gram_used": "gauge",
}
# HAProxy's own exporter: no prefix.
HAPROXY = {"haproxy_process_current_connections", "haproxy_process_max_connections"}

# Grafana puts a duration and label values in before Prometheus sees the expression.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$application": ".*"}


def exported(named: dict[str, str]) -> set[str]:
    """The names under which Prometheus sees them."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"ray_{name}{ending}" for name, kind in named.items() for ending in endings[kind]}


def own_metrics() -> set[str]:
    """Every exported name of the service's own metrics."""
    return exported(OWN)


def known_metrics() -> set[str]:
    """Every name that an expression may hold."""
    return own_metrics() | exported(RAYS) | HAPROXY


def dashboard_metrics() -> set[str]:
    """Every metric named in the dashboards, their variables, and the alerts."""
    dashboards = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))]
    alerts = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))
    expressions = [expression for board in dashboards for expression in dashboard_expressions(board)]
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return {name for expression in expressions for name in metrics_of(expression)}


def dashboard_expressions(board: dict[str, Any]) -> Iterator[str]:
    """The expressions of a dashboard's panels, and the selectors inside its variables' `label_values`."""
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), *\w+\)", variable["query"]["query"])
            if match is None:
                raise ValueError(f"variable {variable['name']}: {variable['query']['query']!r} is not label_values(…)")
            yield match[1]


def metrics_of(expression: str) -> set[str]:
    """The metrics that a PromQL expression names. Raises ValueError when it is not PromQL."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    if "$" in expression:
        raise ValueError(f"unknown variable in {expression!r}")
    names: set[str] = set()

    def note(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            if not node.name:
                raise ValueError(f"a selector without a metric's name in {expression!r}")
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), note)
    return names
