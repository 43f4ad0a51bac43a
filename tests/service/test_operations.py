"""Tests of what an operator sees: metrics that agree with ledger and log, the command line, secrets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric
from serve_app.local_run import LocalRun, find_run
from serve_app.storage.private_files import is_loopback
from tests.cluster.metric_names import dashboard_metrics, own_metrics
from tests.service import intruder
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


def running(service: Service) -> LocalRun:
    found = find_run(service.home)
    assert found is not None
    return found


def connections(service: Service, kind: str) -> Iterator[Any]:
    """The sockets of all processes of the service."""
    launcher = psutil.Process(service.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield from process.net_connections(kind)


def test_what_the_service_writes_is_for_its_owner_alone(service: Service) -> None:
    service.chat(service.first_key, max_tokens=1)
    home = service.home
    written = [*home.glob("ledger.db*"), *home.glob("spool/*"), *home.glob("logs/*.jsonl"), *home.glob("secrets/*")]
    assert {path.parent.name for path in written} == {home.name, "spool", "logs", "secrets"}
    assert {str(path): oct(mode) for path in written if (mode := path.stat().st_mode) & 0o077} == {}
    sockets = [*running(service).haproxy_files("admin.sock")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_reaches_no_file_and_no_socket(service: Service) -> None:
    folders = [str(service.home), str(running(service).folder)]
    paths = {*folders, *(one.laddr for one in connections(service, "unix") if one.laddr)}
    for folder in folders:
        for parent, names, files in os.walk(folder):
            paths |= {os.path.join(parent, name) for name in (*names, *files)}
    assert any(path.startswith("@serve-app-") for path in paths)  # between processes of the service
    assert {"ledger.db", "operator-key", "admin.sock", "raylet"} <= {Path(path).name for path in paths}
    command = [sys.executable, intruder.__file__]
    done = subprocess.run(command, input=json.dumps(sorted(paths)), capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []


METHODS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.InternalKVGcsService/InternalKVKeys",
    "ray.rpc.NodeManagerService/GetResourceLoad",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
)
PAGES = ("/admin/accounts", "/user/usage", "/api/v0/nodes", "/api/jobs/", "/api/serve/applications/", "/nodes", "/logs")
REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,  # not of this port
    grpc.StatusCode.UNAVAILABLE,  # not gRPC
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


def page(host: str, port: int, path: str) -> httpx.Response | None:
    with contextlib.suppress(httpx.HTTPError):  # not HTTP
        return httpx.get(f"http://{host}:{port}{path}", timeout=60, trust_env=False)
    return None


def call(host: str, port: int, method: str) -> grpc.StatusCode:
    """The status of a call without a token."""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(f"/{method}")(b"", timeout=60)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.slow
def test_no_port_but_the_public_one_answers_without_a_token(service: Service) -> None:
    """Metrics are for this machine alone. All else wants a token or a key."""
    listening = {one.laddr for one in connections(service, "tcp") if one.status == psutil.CONN_LISTEN}
    answered: set[str] = set()
    for address, port in sorted(listening):
        if port == service.http.base_url.port:
            continue
        is_local = is_loopback(address)
        host = address if is_local and ":" not in address else "127.0.0.1"
        metrics_page = page(host, port, "/metrics")
        if metrics_page is not None and metrics_page.is_success:
            assert metrics_page.text.startswith("# HELP")
            assert is_local, f"metrics on {address}:{port}"
            continue
        for path in PAGES:
            shown = page(host, port, path)
            assert shown is None or shown.status_code >= 400, f"{address}:{port}{path}"
        codes = {method: call(host, port, method) for method in METHODS}
        assert {*codes.values()} <= REFUSED, f"{address}:{port}: {codes}"
        wants_token = {method for method, code in codes.items() if code == grpc.StatusCode.UNAUTHENTICATED}
        assert is_local or wants_token, f"{address}:{port}: {codes}"
        answered |= wants_token
    assert answered == set(METHODS)
