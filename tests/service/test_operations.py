"""What an operator sees: scaling under load, metrics that agree with the clients, the command line."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.metric_names import dashboard_metrics, own_metrics
from tests.service.harness import FRANCE, Service, nano, until

pytestmark = pytest.mark.service


def replicas(service: Service) -> int:
    for model in service.admin("GET", "/admin/models")["data"]:
        for backend in model["backends"]:
            if backend["name"] == "smollm2":
                return int(backend["replicas"])
    raise AssertionError("no such backend")


@pytest.mark.slow
async def test_under_load_a_second_replica_comes_and_goes_without_cutting_a_stream(service: Service) -> None:
    await asyncio.to_thread(until, lambda: replicas(service) == 1, 120)
    account = await asyncio.to_thread(service.account, "scaling")
    stop = asyncio.Event()
    finished: list[int] = []

    async def streams() -> None:
        async with service.async_client(account.key) as client:
            while not stop.is_set():
                stream = await client.chat.completions.create(
                    model="svc-chat",
                    messages=FRANCE,
                    stream=True,
                    stream_options={"include_usage": True},
                    max_tokens=40,
                    extra_body={"ignore_eos": True},
                )
                usage = None
                async for chunk in stream:
                    usage = chunk.usage or usage
                assert usage is not None, "a stream was cut"
                finished.append(usage.completion_tokens)

    clients = [asyncio.create_task(streams()) for _ in range(32)]
    await asyncio.to_thread(until, lambda: replicas(service) == 2, 120, 0.5)
    both = len(service.pids("smollm2:Model"))
    wanted = len(finished) + 32
    while len(finished) < wanted:
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*clients)
    assert both == 2
    assert set(finished) == {40}
    await asyncio.to_thread(until, lambda: replicas(service) == 1, 120, 0.5)
    view = await asyncio.to_thread(account.settled, len(finished))
    assert view["usage"]["completion_tokens"] == 40 * len(finished)


def scrape(service: Service) -> dict[str, list[Any]]:
    """Samples by name, from Ray's own endpoint."""
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(service.http.get(service.metrics_url).text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def total(service: Service, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for sample in scrape(service).get(name, [])
        if all(sample.labels.get(label) == value for label, value in labels.items())
    )


def test_a_scrape_of_the_metrics_agrees_with_what_the_clients_saw(service: Service) -> None:
    names = {
        "prompt": "ray_serve_app_prompt_tokens_total",
        "completion": "ray_serve_app_completion_tokens_total",
    }
    service.chat(service.first_key, max_tokens=1)
    until(lambda: total(service, names["completion"]))

    def settle_down() -> dict[str, float]:
        """The counters once an export has passed in which nothing moved."""
        now = {
            "ok": total(service, "ray_serve_app_requests_total", model="svc-chat", status="200"),
            "429": total(service, "ray_serve_app_refusals_total", reason="requests"),
            "ttft": total(service, "ray_serve_app_ttft_seconds_count", model="svc-chat"),
            **{key: total(service, name, model="svc-chat") for key, name in names.items()},
        }
        return now

    before: dict[str, float] = {}

    def quiet() -> bool:
        nonlocal before
        last, before = before, settle_down()
        return last == before

    until(quiet, 30, 2.5)
    account = service.account("metrics", rpm=2)
    usages = [service.chat(account.key, max_tokens=4).json() for _ in range(3)]
    usages, refused = usages[:2], usages[2]
    assert "error" in refused
    expected = {
        "ok": before["ok"] + 2,
        "429": before["429"] + 1,
        "ttft": before["ttft"] + 2,
        "prompt": before["prompt"] + sum(reply["usage"]["prompt_tokens"] for reply in usages),
        "completion": before["completion"] + sum(reply["usage"]["completion_tokens"] for reply in usages),
    }
    until(lambda: settle_down() == expected, 30, 0.5)


def test_every_metric_that_the_dashboard_and_the_alerts_name_is_there(service: Service) -> None:
    for _ in range(2):  # the second one finds its prompt in the cache
        service.chat(service.first_key, max_tokens=8)  # enough for a time between two pieces
    assert service.http.post("/chat/completions", json={}).status_code == 401
    assert service.chat(service.first_key, model="svc-broken").status_code == 500
    expected = own_metrics() | dashboard_metrics()

    seen: set[str] = set()

    def complete() -> bool:
        # Some of Ray's gauges are set every ten seconds and are not exported in between.
        families = text_string_to_metric_families(service.http.get(service.haproxy_metrics_url).text)
        seen.update(scrape(service), (sample.name for family in families for sample in family.samples))
        return expected <= seen

    with contextlib.suppress(AssertionError):
        until(complete, 30, 0.5)
    assert expected - seen == set()


@pytest.mark.slow
def test_the_command_line_works_on_the_running_service(service: Service) -> None:
    created = service.cli("accounts", "create", "cli account", "--credit", "5")
    key = service.cli("keys", "create", created["id"])
    assert key["key"].startswith("sk-")
    limits = service.cli("accounts", "limits", created["id"], "--rpm", "7", "--tpm", "5000", "--concurrency", "2")
    assert limits["limits"] == {"rpm": 7, "tpm": 5000, "concurrency": 2}
    # The limiter hears of it within a second.
    until(lambda: service.chat(key["key"], max_tokens=2).headers["x-ratelimit-limit-requests"] == "7", timeout_s=1.0)
    shown = service.cli("accounts", "show", created["id"])
    assert nano(shown["balance"]) == nano("5") - nano(shown["usage"]["charged"])
    assert nano(shown["topped_up"]) == nano(shown["balance"])
    assert nano(shown["granted"]) == nano(shown["held"]) == 0
    assert shown["usage"]["completion_tokens"] == 2 * shown["usage"]["requests"]
    assert any(account["id"] == created["id"] for account in service.cli("accounts", "list")["data"])
    service.cli("accounts", "credit", created["id"], "1.25", "--grant")
    assert nano(service.cli("accounts", "show", created["id"])["granted"]) == nano("1.25")
    service.cli("keys", "revoke", key["id"])
    until(lambda: service.chat(key["key"], max_tokens=1).status_code == 401, 1.0)
    service.cli("accounts", "suspend", created["id"])
    assert service.cli("accounts", "show", created["id"])["status"] == "suspended"
    assert service.cli("ledger", "check")["ok"]
    assert {model["id"] for model in service.cli("models")["data"]} >= {"svc-chat", "svc-coder"}
    assert service.cli("doctor")["ok"]


def test_secrets_are_readable_by_their_owner_alone(service: Service) -> None:
    secrets = list((service.home / "secrets").iterdir())
    assert {path.name for path in secrets} >= {"operator-key", "key-secret", "first-api-key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
