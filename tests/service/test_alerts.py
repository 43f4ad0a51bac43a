"""The running service is brought into trouble, and a real Prometheus with the shipped rules says so.

All durations of the rules are divided by SHORTER, so that they fire within seconds; conditions stay as they are. What
is not provoked here has a case of promtool alone: ServeAppCertificateExpires (no cert-manager), ServeAppBooksUnchecked
(an hour without a check) and ServeAppBackendEjected (two backends of one identifier: test_canary.py has them).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dashboards import rules
from dashboards.exported import REPLICA_STARTS
from dashboards.query import Prometheus
from serve_app.contracts.books import Outcome, Settlement
from serve_app.contracts.money import Price
from serve_app.storage.spool import Spool
from tests.service.harness import FRANCE, PRICE_CACHED, PRICE_IN, PRICE_OUT, Account, Service, until
from tests.service.prometheus import SHIPPED, scraping, shortened
from tests.service.started import started

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"),
]

CONFIG = "tests/service/alerts.yaml"
SHORTER = 60
BURNS = ("1h", "6h", "3d")
LEFT_BEHIND = 55_000  # settlements in the spool of a gateway that died: above 16 MiB
NOT_PROVOKED = {"ServeAppCertificateExpires", "ServeAppBooksUnchecked", "ServeAppBackendEjected"}


@pytest.fixture(scope="module")
def service(model_path: Path) -> Iterator[Service]:
    with started(model_path, CONFIG, dashboard=True, RAY_metrics_report_interval_ms="2000") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(tmp_path_factory.mktemp("prometheus"), {"local": service}, shortened(SHIPPED, SHORTER)) as running:
        assert service.answers()
        yield running


class Watch:
    """Which alerts have fired since it began, by name; also by name and long window, or name and backend."""

    provoked: set[str] = set()  # noqa: RUF012 - by all tests of this file

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._began = time.time()

    def fired(self) -> set[str]:
        seconds = max(1, int(time.time() - self._began))
        found = self._prometheus.ask(f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds}s])')
        alerts = [one.labels for one in found]
        return {
            f"{one['alertname']} {one.get(label, '')}".strip() for one in alerts for label in ("", "long", "backend")
        }

    def wait_for(self, *wanted: str, timeout_s: float = 300.0) -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: set(wanted) <= self.fired(), timeout_s, 0.5)
        assert set(wanted) <= self.fired()
        Watch.provoked |= {one.split()[0] for one in wanted}


@pytest.fixture
def watch(prometheus: Prometheus) -> Watch:
    return Watch(prometheus)


@contextlib.contextmanager
def busy(service: Service, key: str, clients: int, **body: Any) -> Iterator[None]:
    """So many clients that ask again and again, whatever they get. At the end they hang up."""
    stop = threading.Event()
    asked = {"model": "svc-chat", "messages": FRANCE, "max_tokens": 2, "stream": True, **body}
    headers = {"authorization": f"Bearer {key}"}

    def ask() -> None:
        with httpx.Client(base_url=service.base_url, timeout=120, trust_env=False) as http:
            while not stop.is_set():
                with (
                    contextlib.suppress(httpx.HTTPError),
                    http.stream("POST", "/chat/completions", json=asked, headers=headers) as reply,
                ):
                    for _ in reply.iter_lines():
                        if stop.is_set():
                            break
                stop.wait(0.1)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def ledger_takes_no_writes(service: Service) -> Iterator[None]:
    """Another program holds the lock of the ledger's writers."""
    with contextlib.closing(sqlite3.connect(service.home / "ledger.db", timeout=120, isolation_level=None)) as database:
        database.execute("begin immediate")
        yield
        database.execute("rollback")


def by_hand(service: Service, statement: str, account: Account) -> None:
    """Changes a row of the ledger outside of it, as an operator must not do."""
    with contextlib.closing(sqlite3.connect(service.home / "ledger.db", timeout=120, isolation_level=None)) as database:
        assert database.execute(statement, (account.id,)).rowcount == 1


@contextlib.contextmanager
def reply_that_runs(service: Service, account: Account, tokens: int = 300) -> Iterator[httpx.Response]:
    """A stream that has begun. It is read to its end, or to where it is cut."""
    body = {"model": "svc-chat", "messages": FRANCE, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {account.key}"}
    with service.http.stream("POST", "/chat/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield stream
        with contextlib.suppress(httpx.HTTPError):
            for _ in lines:
                pass


def replace_replica(service: Service, deployment: str) -> None:
    """Kills the only replica; returns when another one runs."""
    [old] = service.pids(deployment)
    os.kill(old, signal.SIGKILL)
    until(lambda: [pid for pid in service.pids(deployment) if pid != old])


def test_requests_that_fail_or_are_late_burn_the_budgets(service: Service, watch: Watch) -> None:
    account = service.account("burns")
    for _ in range(12):
        assert service.chat(account.key, model="svc-broken").status_code == 500
        assert service.chat(account.key, model="svc-strict", max_tokens=8, ignore_eos=True).status_code == 200
    budgets = ("Availability", "FirstToken", "OutputToken")
    watch.wait_for(*(f"ServeApp{budget}Budget {burn}" for budget in budgets for burn in BURNS))


def test_a_backend_that_never_started(service: Service, watch: Watch) -> None:
    """An application is added whose model does not exist."""
    config = yaml.safe_load((service.home / "run" / "config.yaml").read_text())
    gateway, smollm2, *_ = config["applications"]
    models = gateway["deployments"][0]["user_config"]["models"]
    models["svc-never"] = {**models["svc-chat"], "backends": {"never": 100}}
    never = {**smollm2, "name": "never", "args": {"model": "/srv/no-such-model"}}
    config["applications"].append(never)
    token = (service.home / "secrets" / "ray-token").read_text().strip()
    answer = httpx.put(
        f"{service.dashboard_url}/api/serve/applications/",
        content=json.dumps(config),
        headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        timeout=300,
        trust_env=False,
    )
    assert answer.is_success, answer.text
    watch.wait_for("ServeAppBackendDown never")


def test_more_than_a_backend_can_do(service: Service, watch: Watch) -> None:
    account = service.account("much", "50")
    with busy(service, account.key, 12, model="svc-narrow", max_tokens=1900, ignore_eos=True):
        watch.wait_for("ServeAppQueueFull", "ServeAppQueueOld", "ServeAppPressure")


def test_more_sequences_than_a_kv_cache_holds(service: Service, watch: Watch) -> None:
    account = service.account("many", "50")
    with (
        busy(service, account.key, 40, max_tokens=60, ignore_eos=True),
        busy(service, account.key, 50, max_tokens=150, ignore_eos=True),
    ):
        watch.wait_for("ServeAppKvCacheFull")


def test_a_gateway_that_dies(service: Service, watch: Watch) -> None:
    with reply_that_runs(service, service.account("cut"), 1500), contextlib.suppress(httpx.HTTPError):
        replace_replica(service, "gateway:Gateway")
    watch.wait_for("ServeAppHoldsExpired")
    until(service.answers)


def test_a_ledger_that_is_held_up(service: Service, watch: Watch) -> None:
    account = service.account("slow")
    with busy(service, account.key, 3):
        for _ in range(8):
            with ledger_takes_no_writes(service):
                time.sleep(2)  # the trouble itself
            time.sleep(0.3)
        watch.wait_for("ServeAppSlowSettlement")


def test_a_ledger_that_takes_no_writes_and_then_has_to_catch_up(service: Service, watch: Watch) -> None:
    """While a gateway has died and left a large spool."""
    account, other = service.account("spooled", "1000"), service.account("goes on")
    key_id = service.admin("GET", f"/admin/accounts/{account.id}/keys")["data"][0]["id"]
    with busy(service, other.key, 6):
        with ledger_takes_no_writes(service):
            leave_spool(service, account.id, key_id)
            watch.wait_for("ServeAppSpoolOld", "ServeAppSpoolDeep", "ServeAppSpoolGrows")
        watch.wait_for("ServeAppLedgerLag")
    assert account.settled(LEFT_BEHIND, 600)["usage"]["requests"] == LEFT_BEHIND


def leave_spool(service: Service, account_id: str, key_id: str) -> None:
    """As a gateway leaves it that dies during an outage."""
    price = Price(PRICE_IN, PRICE_CACHED, PRICE_OUT)
    ended = time.time() - 100
    spool = Spool(service.home / "spool", "gateway-gone", flushed=False)
    for first in range(0, LEFT_BEHIND, 1000):
        settlements = [
            Settlement(
                f"chatcmpl-{number:032x}", account_id, key_id, "svc-chat", "smollm2", price, 10, 0, 5,
                Outcome.COMPLETED, ended - 1, ended,
            )
            for number in range(first, first + 1000)
        ]  # fmt: skip
        assert spool.append_batch(settlements) == len(settlements)
    spool.close()


@pytest.mark.parametrize(
    ("deployment", "alert"),
    [("gateway:Accounting", "ServeAppFeedStalled"), ("gateway:Limiter", "ServeAppLimiterDoesNotAdmit")],
)
def test_a_process_that_stands_still(service: Service, watch: Watch, deployment: str, alert: str) -> None:
    [pid] = service.pids(deployment)
    os.kill(pid, signal.SIGSTOP)
    try:
        watch.wait_for(alert)
    finally:
        with contextlib.suppress(ProcessLookupError):  # Serve has replaced it
            os.kill(pid, signal.SIGCONT)
    until(service.answers)


def test_a_replica_that_dies_again_and_again(service: Service, watch: Watch, prometheus: Prometheus) -> None:
    def seen() -> int:
        starts = f'last_over_time({REPLICA_STARTS.exported}{{application="broken"}}[1h])'
        return len({one.labels["replica"] for one in prometheus.ask(starts)})

    until(seen)
    for _ in range(4):
        before = seen()
        replace_replica(service, "broken:Broken")
        until(lambda before=before: seen() > before)
    watch.wait_for("ServeAppReplicaRestarts")


def test_rows_that_were_changed_by_hand(service: Service, watch: Watch) -> None:
    emptied, moved = service.account("emptied"), service.account("moved")
    with reply_that_runs(service, emptied):
        by_hand(service, "update accounts set topped_up = 0 where id = ?", emptied)
    with reply_that_runs(service, moved):
        another = "(select id from accounts where id != ?1 limit 1)"
        by_hand(service, f"update api_keys set account_id = {another} where account_id = ?1", moved)
    watch.wait_for("ServeAppUncollected", "ServeAppSettlementRejected")
    replace_replica(service, "gateway:Accounting")  # a new process checks the books, and counts what is stuck
    watch.wait_for("ServeAppBooksUnbalanced", "ServeAppSettlementsStuck")


def test_a_service_that_is_gone(service: Service, watch: Watch) -> None:
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(120)
    watch.wait_for("ServeAppNoGateway")


def test_every_alert_is_provoked_or_named_above() -> None:
    """After all others of this file."""
    assert Watch.provoked == {alert.name for alert in rules.ALERTS} - NOT_PROVOKED
