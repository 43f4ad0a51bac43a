"""A real Prometheus reads the real service: every panel, recording and alert has data, and totals are exact."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dashboards import boards, rules
from dashboards.expressions import panels, selectors, variable_expressions
from dashboards.query import Prometheus, filled
from serve_app.contracts import metrics
from tests.service.harness import HELD, Service, until
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
    with started(model_path, dashboard=True, RAY_metrics_report_interval_ms="10000") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(tmp_path_factory.mktemp("prometheus"), {"local": service}, every_second(SHIPPED)) as running:
        yield running


@pytest.fixture(scope="module")
def traffic(service: Service, prometheus: Prometheus) -> None:
    """Most kinds of requests, each status among them."""
    account = service.account("scraped")
    limited = service.account("limited", rpm=1)
    poor = service.account("poor", credit=None)

    def chat(key: str, status: int, **body: Any) -> None:
        assert service.chat(key, **{"max_tokens": 12, **body}).status_code == status

    for stream in (False, True):
        chat(account.key, 200, stream=stream)
    chat(account.key, 200, model=HELD)
    chat(account.key, 200, tools=[TOOL], tool_choice="required", max_tokens=40)
    chat(account.key, 400, messages=7)
    chat(account.key, 422, model="moon")
    chat(account.key, 500, model="svc-broken")
    chat("sk-wrong", 401)
    chat(limited.key, 200)
    chat(limited.key, 429)
    chat(poor.key, 402)
    headers = {"authorization": f"Bearer {account.key}"}
    with service.hold() as hold:
        body = {"model": HELD, "messages": hold.messages, "stream": True, "max_tokens": 100}
        with service.http.stream("POST", "/chat/completions", json=body, headers=headers) as stream:
            next(stream.iter_lines())
        account.settled(6)


@pytest.mark.usefixtures("traffic")
def test_totals_are_those_of_the_ledger(service: Service, prometheus: Prometheus) -> None:
    """All that the service has counted since its start, and all that its ledger has."""
    rows = service.admin("GET", "/admin/usage?group_by=model")["data"]
    ledger = {
        metrics.PROMPT_TOKENS: "prompt_tokens",
        metrics.CACHED_TOKENS: "cached_tokens",
        metrics.COMPLETION_TOKENS: "completion_tokens",
    }
    for metric, field in ledger.items():
        wanted = {row["model"]: row[field] for row in rows if row[field]}
        until(lambda metric=metric, wanted=wanted: prometheus.total(metric.exported, "model") == wanted, 120, 0.5)
    charged = {row["model"]: float(row["charged"]) for row in rows if float(row["charged"])}
    until(lambda: prometheus.total(metrics.REVENUE.exported, "model") == pytest.approx(charged), 120, 0.5)


@pytest.mark.usefixtures("traffic")
def test_every_expression_of_boards_and_rules_has_data(service: Service, prometheus: Prometheus) -> None:
    wanted: dict[str, str] = {}
    for board in boards.documents():
        for panel in panels(board):
            wanted |= {target["expr"]: panel["title"] for target in panel["targets"]}
        wanted |= {expression: f"variable {name}" for name, expression in variable_expressions(board)}
    for rule in rules.ALERTS:  # a healthy one has no result: what it reads must be there
        wanted |= {selector.prettify(): f"alert {rule.name}" for selector in selectors(rule.expr)}
    wanted |= {rule.name: "recording" for rule in rules.RECORDINGS}
    silent = {
        filled(one, window="30s"): where for one, where in wanted.items() if not any(name in one for name in ABSENT)
    }
    began = time.time()

    def all_answer() -> bool:
        """Some of Ray's gauges are set every ten seconds and are not exported in between: each has had data once."""
        for _ in range(4):
            service.chat(service.first_key, max_tokens=12, temperature=1)
        for expression in list(silent):
            if prometheus.ask_range(expression, began, time.time(), 1):
                del silent[expression]
        return not silent

    with contextlib.suppress(AssertionError):
        until(all_answer, 180, 0.5)
    assert not silent, "\n".join(f"{where}: {expression}" for expression, where in silent.items())
    groups = prometheus.get("rules")["groups"]
    assert {one["name"] for group in groups for one in group["rules"]} == {
        rule.name for group in rules.GROUPS for rule in group.rules
    }
    assert not [one for group in groups for one in group["rules"] if one["health"] == "err"]


def test_rules_and_boards_are_in_the_package() -> None:
    packaged = {path.name for path in (files("serve_app.boards")).iterdir()}
    assert {Path(path).name for path in boards.files()} <= packaged
    assert "rules.yaml" in packaged
