"""Tests of what an operator sees: metrics that agree with ledger and log, the command line, secrets."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric
from tests.cluster.metric_names import dashboard_metrics, own_metrics
from tests.service.harness import Service, nano, until

pytestmark = pytest.mark.service


def totals(service: Service, metric: Metric, label: str) -> dict[str, float]:
    """The sums by one label, without those that are 0, from Ray's own endpoint."""
    lines = service.http.get(service.metrics_url).text.splitlines()
    text = "".join(f"{line}\n" for line in lines if line.startswith(f"{metric.exported}{{"))
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.labels[label]] += sample.value
    return {name: value for name, value in sums.items() if value}


def test_a_scrape_of_the_metrics_agrees_with_the_ledger_and_the_log(service: Service) -> None:
    """All that the service has counted since its start."""
    account = service.account("metrics", rpm=2)
    answers = [service.chat(account.key, max_tokens=4) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    account.settled(2)
    counted = {
        metrics.PROMPT_TOKENS: "prompt_tokens",
        metrics.CACHED_TOKENS: "cached_tokens",
        metrics.COMPLETION_TOKENS: "completion_tokens",
    }
    rows = service.admin("GET", "/admin/usage?group_by=model")["data"]
    for metric, field in counted.items():
        wanted = {row["model"]: row[field] for row in rows if row[field]}
        until(lambda metric=metric, wanted=wanted: totals(service, metric, "model") == wanted)

    def logged() -> Counter[str]:
        lines = [
            json.loads(line)
            for path in (service.home / "logs").glob("gateway-*.jsonl*")
            for line in path.read_text().splitlines()
        ]
        return Counter(str(line["status"]) for line in lines if line["event"] == "request")

    until(lambda: totals(service, metrics.REQUESTS, "status") == logged())
    assert totals(service, metrics.REFUSALS, "reason")["requests"] >= 1


@pytest.mark.slow
def test_every_metric_that_the_dashboard_and_the_alerts_name_is_there(service: Service) -> None:
    for _ in range(2):  # the second one finds its prompt in the cache
        service.chat(service.first_key, max_tokens=8)  # enough for a time between two pieces
    assert service.http.post("/chat/completions", json={}).status_code == 401
    assert service.chat(service.first_key, model="svc-broken").status_code == 500
    expected = own_metrics() | dashboard_metrics()

    seen: set[str] = set()

    def complete() -> bool:
        # Some of Ray's gauges are set every ten seconds and are not exported in between.
        for url in (service.metrics_url, service.haproxy_metrics_url):
            seen.update(re.findall(r"^[a-zA-Z_:][\w:]*", service.http.get(url).text, re.MULTILINE))
        return expected <= seen

    with contextlib.suppress(AssertionError):
        until(complete, 120, 0.5)
    assert expected - seen == set()


@pytest.mark.slow
def test_the_command_line_works_on_the_running_service(service: Service) -> None:
    created = service.cli("accounts", "create", "cli account", "--credit", "5")
    key = service.cli("keys", "create", created["id"])
    assert key["key"].startswith("sk-")
    limits = service.cli("accounts", "limits", created["id"], "--rpm", "7", "--tpm", "5000", "--concurrency", "2")
    assert limits["limits"] == {"rpm": 7, "tpm": 5000, "concurrency": 2}
    # The limiter hears of it by itself.
    until(lambda: service.chat(key["key"], max_tokens=2).headers["x-ratelimit-limit-requests"] == "7")
    shown = service.cli("accounts", "show", created["id"])
    assert nano(shown["balance"]) == nano("5") - nano(shown["usage"]["charged"])
    assert nano(shown["topped_up"]) == nano(shown["balance"])
    assert nano(shown["granted"]) == nano(shown["held"]) == 0
    assert shown["usage"]["completion_tokens"] == 2 * shown["usage"]["requests"]
    assert any(account["id"] == created["id"] for account in service.cli("accounts", "list")["data"])
    service.cli("accounts", "credit", created["id"], "1.25", "--grant")
    assert nano(service.cli("accounts", "show", created["id"])["granted"]) == nano("1.25")
    service.cli("keys", "revoke", key["id"])
    until(lambda: service.chat(key["key"], max_tokens=1).status_code == 401)
    service.cli("accounts", "suspend", created["id"])
    assert service.cli("accounts", "show", created["id"])["status"] == "suspended"
    assert service.cli("ledger", "check")["ok"]
    assert {model["id"] for model in service.cli("models")["data"]} >= {"svc-chat", "svc-coder"}
    assert service.cli("doctor")["ok"]


def test_secrets_are_readable_by_their_owner_alone(service: Service) -> None:
    secrets = list((service.home / "secrets").iterdir())
    assert {path.name for path in secrets} >= {"operator-key", "secret-key", "first-api-key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
