"""Dashboard and alerts: every expression is PromQL, and the service, Ray or HAProxy exports every metric in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from serve_app.contracts import metrics

from .metric_names import (
    DASHBOARDS,
    RAYS,
    dashboard_expressions,
    dashboard_metrics,
    exported,
    known_metrics,
    metrics_of,
    own_metrics,
)
from .mutate import REMOVED, broken, renamed

Document = dict[str, Any]


@pytest.fixture
def board() -> Document:
    return json.loads((DASHBOARDS / "serve-app.json").read_text(encoding="utf-8"))


@pytest.fixture
def alerts() -> Document:
    return yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))


def board_problems(board: Document) -> list[str]:
    problems = [f"{key} is missing" for key in ("uid", "title", "schemaVersion", "templating") if not board.get(key)]
    if problems:
        return problems
    ids = [panel["id"] for panel in board["panels"]]
    if len(ids) != len(set(ids)):
        problems.append("two panels have the same id")
    for panel in board["panels"]:
        if panel["type"] != "row":
            where = f"panel {panel.get('title')!r}"
            problems += [f"{where}: no {key}" for key in ("title", "description", "targets") if not panel.get(key)]
            if panel.get("datasource", {}).get("uid") != "${datasource}":
                problems.append(f"{where}: does not use the data source that is selected")
    if not problems:
        problems += expression_problems(dashboard_expressions(board))
    return problems


def alert_problems(alerts: Document) -> list[str]:
    """The form of a Prometheus rules file, as its documentation gives it."""
    problems = []
    for group in alerts.get("groups", []):
        problems += [f"group: {key} is unknown" for key in group.keys() - {"name", "interval", "rules"}]
        for rule in group.get("rules", []):
            name = rule.get("alert", "?")
            known = {"alert", "expr", "for", "labels", "annotations"}
            problems += [f"{name}: {key} is unknown" for key in rule.keys() - known]
            problems += [f"{name}: {key} is missing" for key in known - {"for"} - rule.keys()]
            if not re.fullmatch(r"\d+[smhd]", str(rule.get("for", "0s"))):
                problems.append(f"{name}: for is not a duration")
            if rule.get("labels", {}).get("severity") not in ("page", "warn"):
                problems.append(f"{name}: severity is neither page nor warn")
            problems += [f"{name}: no {key}" for key in ("summary", "action") if key not in rule.get("annotations", {})]
            problems += expression_problems([rule.get("expr", "")])
    return problems if alerts.get("groups") else ["no groups"]


def expression_problems(expressions: Any) -> list[str]:
    try:
        return [f"nobody exports {name}" for one in expressions for name in metrics_of(one) - known_metrics()]
    except ValueError as error:
        return [str(error)]


def test_the_dashboard_is_valid(board: Document) -> None:
    assert board_problems(board) == []


def test_the_alerts_are_valid(alerts: Document) -> None:
    assert alert_problems(alerts) == []


def test_the_dashboard_shows_every_metric_of_the_service() -> None:
    bases = {re.sub("_(bucket|sum|count)$", "", name) for name in dashboard_metrics()}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in own_metrics()} <= bases


def test_rays_names_are_in_rays_sources() -> None:
    folder = Path(ray.__file__).parent
    files = [
        *(folder / "serve" / "_private").rglob("*.py"),
        *(folder / "dashboard" / "modules" / "reporter").glob("*.py"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = text.replace("serve_num_{protocol_name}_", "serve_num_http_")
    assert [name for name in RAYS if f'"{name}"' not in text] == []


def test_every_row_has_panels(board: Document) -> None:
    titles = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert titles == ["Traffic", "Latency", "Tokens", "Capacity", "Ray Serve", "Limiter and money"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("uid", REMOVED),
        ("templating", REMOVED),
        ("panels/1/title", ""),
        ("panels/1/datasource", {"type": "prometheus", "uid": "somebodys-own"}),
        ("panels/2/id", 2),
        ("panels/1/targets/0/expr", "sum by (model (rate(ray_serve_app_requests_total[5m]))"),
        ("panels/1/targets/0/expr", "sum(rate(ray_serve_app_request_total[5m]))"),
        ("panels/1/targets/0/expr", "sum(rate(ray_serve_app_requests_total))"),
        ("panels/1/targets/0/expr", "sum(rate(ray_serve_app_requests_total[$window]))"),
        ("panels/1/targets/0/expr", ""),
        ("templating/list/1/query/query", "label_values(ray_serve_app_reqs_total, model)"),
        ("templating/list/1/query/query", "models()"),
    ],
)
def test_a_broken_dashboard_is_found(board: Document, path: str, value: object) -> None:
    assert board_problems(broken(board, path, value)) != []


RULE = "groups/0/rules/0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("groups", REMOVED),
        (f"{RULE}/expr", REMOVED),
        (f"{RULE}/expr", "sum(ray_serve_app_request_total) > 1"),
        (f"{RULE}/expr", "sum(ray_serve_app_requests_total > 1"),
        (f"{RULE}/for", "five minutes"),
        (f"{RULE}/labels/severity", "urgent"),
        (f"{RULE}/annotations/action", REMOVED),
    ],
)
def test_broken_alerts_are_found(alerts: Document, path: str, value: object) -> None:
    assert alert_problems(broken(alerts, path, value)) != []


@pytest.mark.parametrize(
    ("path", "name"), [(f"{RULE}/for", "fro"), (f"{RULE}/alert", "alret"), ("groups/0/rules", "rule")]
)
def test_a_misspelt_key_in_the_alerts_is_found(alerts: Document, path: str, name: str) -> None:
    assert alert_problems(renamed(alerts, path, name)) != []


@pytest.mark.parametrize(
    "metric",
    [
        metrics.UNCOLLECTED,
        metrics.STUCK,
        metrics.SPOOL_SETTLEMENTS,
        metrics.SPOOL_BYTES,
        metrics.SPOOL_AGE,
        metrics.LIMITER_EPOCH,
        metrics.FEED_AGE_SECONDS,
        metrics.EXPIRED_HOLDS,
    ],
    ids=lambda metric: metric.name,
)
def test_money_at_risk_and_a_limiter_in_trouble_raise_an_alert(alerts: Document, metric: metrics.Metric) -> None:
    named = {name for group in alerts["groups"] for rule in group["rules"] for name in metrics_of(rule["expr"])}
    assert exported({metric.name: metric.kind}) <= named
