"""A real Prometheus reads the real service: every panel, recording and alert has data, and totals are exact."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards import boards, rules
from dashboards.expressions import panels, selectors, variable_expressions
from dashboards.query import Prometheus, filled
from serve_app.contracts import metrics
from tests.service.harness import FRANCE, Service, until
from tests.service.prometheus import SHIPPED, every_second, scraping
from tests.service.started import started

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"),
]

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# What one machine without a GPU, and a healthy service, has no series of.
ABSENT = {
    "ray_node_gpus_utilization": "no GPU",
    "ray_node_gram_used": "no GPU",
    "ray_node_gram_available": "no GPU",
    "certmanager_certificate_expiration_timestamp_seconds": "no cert-manager",
}


@pytest.fixture(scope="module")
def service(model_path: Path) -> Iterator[Service]:
    """With Ray's own interval between two exports: with a shorter one, its gauges are missing in most scrapes."""
    with started(model_path, RAY_metrics_report_interval_ms="10000") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(tmp_path_factory.mktemp("prometheus"), {"local": service}, every_second(SHIPPED)) as running:
        yield running


@pytest.fixture(scope="module")
def seen(service: Service, prometheus: Prometheus) -> Counter[str]:
    """Statuses that clients saw, of one account; the traffic has most kinds of requests."""
    statuses: Counter[str] = Counter()
    account = service.account("scraped")
    limited = service.account("limited", rpm=1)
    poor = service.account("poor", credit=None)

    def chat(key: str, **body: Any) -> httpx.Response:
        answer = service.chat(key, **{"max_tokens": 12, **body})
        statuses[str(answer.status_code)] += 1
        return answer

    for _ in range(3):
        chat(account.key)
        chat(account.key, stream=True)
    chat(account.key, model="svc-coder")
    chat(account.key, tools=[TOOL], tool_choice="required", max_tokens=40)
    chat(account.key, messages=7)
    chat(account.key, model="moon")
    chat(account.key, model="svc-broken")
    chat("sk-wrong")
    chat(limited.key)
    chat(limited.key)
    chat(poor.key)
    body = {"model": "svc-chat", "messages": FRANCE, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    headers = {"authorization": f"Bearer {account.key}"}
    with service.http.stream("POST", "/chat/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    statuses["499"] += 1
    account.settled(10)
    return statuses


def test_totals_are_those_of_the_clients_and_of_the_ledger(
    service: Service, prometheus: Prometheus, seen: Counter[str]
) -> None:
    """All that the service has counted since its start, and all that its ledger has."""
    rows = service.admin("GET", "/admin/usage?group_by=model")["data"]
    ledger = {
        metrics.PROMPT_TOKENS: "prompt_tokens",
        metrics.CACHED_TOKENS: "cached_tokens",
        metrics.COMPLETION_TOKENS: "completion_tokens",
    }
    for metric, field in ledger.items():
        wanted = {row["model"]: row[field] for row in rows if row[field]}
        with contextlib.suppress(AssertionError):
            until(lambda metric=metric, wanted=wanted: prometheus.total(metric.exported, "model") == wanted, 30, 0.5)
        assert prometheus.total(metric.exported, "model") == wanted
    charged = {row["model"]: float(row["charged"]) for row in rows if float(row["charged"])}
    with contextlib.suppress(AssertionError):
        until(lambda: prometheus.total(metrics.REVENUE.exported, "model") == pytest.approx(charged), 30, 0.5)
    assert prometheus.total(metrics.REVENUE.exported, "model") == pytest.approx(charged)
    lines = [
        json.loads(line)
        for path in (service.home / "logs").glob("gateway-*.jsonl*")
        for line in path.read_text().splitlines()
    ]
    statuses = Counter(str(line["status"]) for line in lines if line["event"] == "request")
    with contextlib.suppress(AssertionError):
        until(lambda: prometheus.total(metrics.REQUESTS.exported, "status") == dict(statuses), 30, 0.5)
    assert prometheus.total(metrics.REQUESTS.exported, "status") == dict(statuses)
    assert all(statuses[status] >= count for status, count in seen.items())


def test_every_expression_of_boards_and_rules_has_data(
    service: Service, prometheus: Prometheus, seen: Counter[str]
) -> None:
    wanted: dict[str, str] = {}
    for board in boards.documents():
        for panel in panels(board):
            wanted |= {target["expr"]: panel["title"] for target in panel["targets"]}
        wanted |= {expression: f"variable {name}" for name, expression in variable_expressions(board)}
    for rule in rules.ALERTS:  # a healthy one has no result: what it reads must be there
        wanted |= {selector.prettify(): f"alert {rule.name}" for selector in selectors(rule.expr)}
    silent: dict[str, str] = {}

    def all_answer() -> bool:
        silent.clear()
        for _ in range(4):
            service.chat(service.first_key, max_tokens=12, temperature=1)
        for expression, where in wanted.items():
            if not any(name in expression for name in ABSENT) and not prometheus.ask(filled(expression, window="30s")):
                silent[where] = filled(expression, window="30s")
        return not silent

    with contextlib.suppress(AssertionError):
        until(all_answer, 60, 0.5)
    assert not silent, "\n".join(f"{where}: {expression}" for where, expression in silent.items())
    groups = prometheus.get("rules")["groups"]
    assert {one["name"] for group in groups for one in group["rules"]} == {
        rule.name for group in rules.GROUPS for rule in group.rules
    }
    assert not [one for group in groups for one in group["rules"] if one["health"] == "err"]
    recorded = {rule.name for rule in rules.RECORDINGS}
    until(lambda: all(prometheus.ask(name) for name in recorded), 60, 2.0)


def test_no_alert_fires_on_a_healthy_service(prometheus: Prometheus, seen: Counter[str]) -> None:
    until(lambda: prometheus.ask("serve_app:slo_requests:increase5m"), 60)
    firing = {one["alertname"] for one in prometheus.alerts("firing")}
    assert firing == set()


def test_rules_and_boards_are_in_the_package() -> None:
    packaged = {path.name for path in (files("serve_app.boards")).iterdir()}
    assert {Path(path).name for path in boards.files()} <= packaged
    assert "rules.yaml" in packaged
