"""One Prometheus over two whole services: variables keep them apart, and neither hides the other's trouble."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.healthy.traffic import Keys, Traffic
from dashboards import boards
from dashboards.expressions import panels, selectors
from dashboards.promql import select
from dashboards.query import Prometheus, filled
from serve_app.contracts import metrics
from tests.service.harness import FRANCE, Service, until
from tests.service.prometheus import SHIPPED, scraping, shortened
from tests.service.started import started

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"),
]

CONFIG = "tests/service/one_backend.yaml"
SHORTER = 6  # times are the rules' durations
TRAFFIC_S = 30  # longer than ServeAppNoGateway waits then
BILLED = {
    metrics.PROMPT_TOKENS: "prompt_tokens",
    metrics.CACHED_TOKENS: "cached_tokens",
    metrics.COMPLETION_TOKENS: "completion_tokens",
}


@pytest.fixture(scope="module")
def services(model_path: Path) -> Iterator[dict[str, Service]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                started(model_path, CONFIG, dashboard=True, RAY_metrics_report_interval_ms="10000")
            )
            for name in ("north", "south")
        }


@pytest.fixture(scope="module")
def prometheus(services: dict[str, Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(tmp_path_factory.mktemp("prometheus"), services, shortened(SHIPPED, SHORTER)) as running:
        for service, requests in zip(services.values(), (3, 5), strict=True):
            account = service.account("scraped")
            for number in range(requests):
                service.chat(account.key, max_tokens=10 + number, stream=number % 2 == 0)
            account.settled(requests)
        yield running


def billed(service: Service) -> dict[str, dict[str, float]]:
    """By field and model, as the ledger has it."""
    rows = service.admin("GET", "/admin/usage?group_by=model")["data"]
    return {field: {row["model"]: row[field] for row in rows if row[field]} for field in BILLED.values()}


def test_with_one_cluster_chosen_the_numbers_are_those_of_its_ledger(
    services: dict[str, Service], prometheus: Prometheus
) -> None:
    ledgers = {name: billed(service) for name, service in services.items()}
    assert ledgers["north"] != ledgers["south"]

    def shown() -> dict[str, dict[str, dict[str, float]]]:
        return {
            name: {
                field: prometheus.total(filled(select(metric), {"cluster": name}), "model")
                for metric, field in BILLED.items()
            }
            for name in services
        }

    until(lambda: shown() == ledgers, 120, 0.5)
    charged = {
        name: sum(float(row["charged"]) for row in service.admin("GET", "/admin/usage?group_by=model")["data"])
        for name, service in services.items()
    }

    def revenue() -> dict[str, float]:
        return {
            name: sum(prometheus.total(filled(select(metrics.REVENUE), {"cluster": name}), "model").values())
            for name in services
        }

    # Gateways report tokens, accounting reports revenue: each at its own moment.
    until(lambda: revenue() == pytest.approx(charged), 120, 0.5)


@pytest.mark.parametrize("chosen", ["north", "south"])
def test_with_one_cluster_chosen_every_panel_reads_its_series_alone(prometheus: Prometheus, chosen: str) -> None:
    read: set[str] = set()
    for board in boards.documents():
        for panel in panels(board):
            for target in panel["targets"]:
                for selector in selectors(filled(target["expr"], {"cluster": chosen})):
                    found = prometheus.ask(selector.prettify())
                    assert {series.labels["cluster"] for series in found} <= {chosen}, (panel["title"], selector.name)
                    read |= {str(selector.name)} if found else set()
    both = prometheus.ask('group by (cluster) ({__name__=~"ray_serve.*|haproxy.*"})')
    assert {series.labels["cluster"] for series in both} == {"north", "south"}
    assert {metrics.REQUESTS.exported, metrics.ENGINE_STEPS.exported, metrics.LIMITER_EPOCH.exported} <= read


def test_the_alert_names_the_cluster_that_is_gone_and_the_other_stays_quiet(
    services: dict[str, Service], prometheus: Prometheus
) -> None:
    """With the rules as they are shipped but for their durations, and ordinary traffic to the one that is well."""
    north, south = services.values()
    assert not prometheus.alerts("firing")
    south.process.send_signal(signal.SIGTERM)
    south.process.wait(120)
    traffic = Traffic(
        north.base_url, Keys(north.account("roomy").key, north.account("narrow", rpm=6).key), 1, ("svc-chat",)
    )
    asyncio.run(traffic.send(2, TRAFFIC_S))
    until(lambda: prometheus.alerts("firing"), 300)
    fired = prometheus.ask(f'max_over_time(ALERTS{{alertstate="firing"}}[{TRAFFIC_S + 60}s])')
    assert {(one.labels["alertname"], one.labels.get("cluster")) for one in fired} == {("ServeAppNoGateway", "south")}
    assert {one.get("cluster") for one in prometheus.alerts("pending")} <= {"south"}
    assert north.chat(north.first_key, FRANCE, max_tokens=1).status_code == 200
    assert traffic.statuses[200] > 20
    assert not [status for status in traffic.statuses if status == 0 or status >= 500]
