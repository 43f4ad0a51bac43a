"""The linter finds what would show nothing, or the wrong thing, and names the panel."""

from __future__ import annotations

import pytest

from dashboards import boards
from dashboards.lint import dead_metrics, problems
from serve_app.contracts import metrics
from tests.cluster.mutate import REMOVED, broken

BOARD = next(board for board in boards.documents() if board["uid"] == "serve-app-users")
NUMBER = "Do requests get an answer?"
GRAPH = "What do users get back?"
SELECTED = 'cluster=~"$cluster", namespace=~"$namespace"'


def at(title: str) -> str:
    """The path of a panel in the board."""
    return f"panels/{[panel['title'] for panel in BOARD['panels']].index(title)}"


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ((NUMBER, "fieldConfig/defaults/unit"), REMOVED, "no unit"),
        ((NUMBER, "title"), "Availability", "the title is not a question"),
        ((NUMBER, "description"), REMOVED, "no description"),
        ((NUMBER, "fieldConfig/defaults/thresholds"), REMOVED, "without thresholds"),
        ((NUMBER, "fieldConfig/defaults/thresholds/steps"), [{"color": "green", "value": None}], "without thresholds"),
        ((NUMBER, "links"), [], "no link to the next board"),
        ((NUMBER, "links/0/url"), "/d/serve-app-old", "links to serve-app-old, which is not a board"),
        ((NUMBER, "datasource"), {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}, "a data source that is fixed"),
        ((GRAPH, "targets/0/datasource/uid"), "P1809F7CD0C75ACF3", "a data source that is fixed"),
        ((GRAPH, "targets"), [], "no expression"),
        ((GRAPH, "targets/0/legendFormat"), "{{code}}", "the legend names 'code'"),
        ((GRAPH, "title"), NUMBER, "2 panels have this title"),
    ],
)
def test_a_broken_panel_is_found(place: tuple[str, str], value: object, problem: str) -> None:
    title, path = place
    mutated = broken(BOARD, f"{at(title)}/{path}", value)
    title = value if path == "title" and isinstance(value, str) else title
    assert [one for one in problems(mutated) if f"panel {title!r}: " in one and problem in one]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        (f"sum by (status (rate(ray_serve_app_requests_total{{{SELECTED}}}[5m]))", "not PromQL"),
        (f"sum by (status) (rate(ray_serve_app_requests_total{{{SELECTED}}}))", "not PromQL"),
        (f"sum by (status) (rate(ray_serve_app_requests_total{{{SELECTED}}}[$window]))", "not PromQL"),
        (f"{{{SELECTED}}}", "not PromQL"),
        ("", "not PromQL"),
        (
            f"sum by (status) (ray_serve_app_request_total{{{SELECTED}}})",
            "no process exports ray_serve_app_request_total",
        ),
        (f"sum by (code) (ray_serve_app_requests_total{{{SELECTED}}})", "no metric has the label 'code'"),
        (f'ray_serve_app_requests_total{{{SELECTED}, status="OK"}}', "never has status='OK'"),
        (f'ray_serve_app_phase_seconds_sum{{{SELECTED}, phase=~"queue|pre"}}', "never has phase='pre'"),
        ('ray_serve_app_requests_total{cluster=~"$cluster"}', 'is not selected by namespace=~"$namespace"'),
        ('ray_serve_app_requests_total{namespace=~"$namespace"}', 'is not selected by cluster=~"$cluster"'),
        (f'ray_serve_app_requests_total{{{SELECTED}, model=~"$model"}}', "the variable 'model' is not defined"),
    ],
)
def test_a_broken_expression_is_found(expression: str, problem: str) -> None:
    mutated = broken(BOARD, f"{at(GRAPH)}/targets/0/expr", expression)
    assert [one for one in problems(mutated) if f"panel {GRAPH!r}: " in one and problem in one]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("uid", REMOVED, "the board has no uid"),
        ("templating", REMOVED, "the board has no templating"),
        ("panels/2/id", 2, f"panels [{NUMBER!r}, "),
        ("templating/list/4/name", "model", "variable 'model': it is not used"),
        (
            "templating/list/1/query/query",
            "label_values(ray_serve_app_reqs_total, cluster)",
            "variable 'cluster': no process",
        ),
        ("templating/list/1/query/query", "clusters()", "variable 'cluster': not PromQL"),
        ("templating/list/2/query/query", 'label_values(up{a="$region"}, b)', "the variable 'region' is not defined"),
        ("templating/list/1/datasource/uid", "P1809F7CD0C75ACF3", "variable 'cluster': a data source that is fixed"),
    ],
)
def test_a_broken_board_is_found(path: str, value: object, problem: str) -> None:
    assert [one for one in problems(broken(BOARD, path, value)) if problem in one]


def test_a_metric_that_nobody_uses_is_named() -> None:
    rules = [f"{metric.exported}{'_sum' * (metric.kind == 'histogram')}" for metric in metrics.ALL]
    spare = rules.pop()
    assert dead_metrics([], rules) == [f"no board and no rule uses {spare}"]
    assert dead_metrics([{"panels": [], "templating": {"list": []}}], [*rules, f"sum({spare}) > 0"]) == []
