"""`make observe` finds the running service, and a real Prometheus reads what it exports, apart from other services.

The service is a stand-in: the files that its launcher, Ray and HAProxy write, and two small exporters.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from serve_app.launch import prometheus_config
from serve_app.launch.driver import driver_environment
from serve_app.launch.observe import main, write_config
from serve_app.launch.preflight import LaunchError, free_port
from serve_app.launch.prometheus_config import Service, check_config, find_service
from tests.cli.fake_grafana import TOKEN, FakeGrafana

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus binary")
RULES = "groups: [{name: ours, rules: [{record: serve_app:sum, expr: sum(serve_app_test)}]}]\n"


@dataclass(frozen=True)
class StandIn:
    """A service's state folder, and how to set what it exports."""

    home: Path
    addresses: dict[str, str]

    def start(self, run_folder: Path, ray: str, haproxy: str) -> None:
        """Creates what exists once a service is ready. Its run folder is a new one at each start."""
        logs = run_folder / "ray" / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        (self.home / "run").mkdir(exist_ok=True)
        (self.home / "run" / "lock").write_text(f"process {os.getpid()}")
        (logs.parent / "prom_metrics_service_discovery.json").write_text(
            json.dumps([{"labels": {"job": "ray"}, "targets": [ray]}])
        )
        (run_folder / "ha" / "a1b2").mkdir(parents=True)
        host, port = haproxy.rsplit(":", 1)
        (run_folder / "ha" / "a1b2" / "haproxy.cfg").write_text(
            f"global\nfrontend prometheus\n    bind {host}:{port}\n    mode http\n"
        )
        (self.home / "logs" / "ray").unlink(missing_ok=True)
        (self.home / "logs" / "ray").symlink_to(logs)


def exporter(value: int) -> tuple[str, Callable[[], None]]:
    registry = CollectorRegistry()
    Gauge("serve_app_test", "A number.", registry=registry).set(value)
    server, thread = start_http_server(0, "127.0.0.1", registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"127.0.0.1:{server.server_port}", stop


@pytest.fixture(scope="module")
def exporters() -> Iterator[dict[str, str]]:
    (ray, stop_ray), (haproxy, stop_haproxy) = exporter(1), exporter(2)
    yield {"ray": ray, "haproxy": haproxy}
    stop_ray()
    stop_haproxy()


@pytest.fixture
def stand_in(exporters: dict[str, str], tmp_path: Path) -> StandIn:
    service = StandIn(tmp_path / "home", exporters)
    service.start(tmp_path / "sa-1", **exporters)
    return service


def until(ask: Callable[[], Any]) -> Any:
    """Polls `ask` and returns its first true result."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if found := ask():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("it did not come true in time")


def series(url: str, query: str) -> dict[str, dict[str, str]]:
    """The labels of a query's results, with the value under `value`, by their job."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, trust_env=False).raise_for_status()
    found = answer.json()["data"]["result"]
    return {one["metric"].get("job", ""): {**one["metric"], "value": one["value"][1]} for one in found}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_config, "SCRAPE_S", 1)


@needs_prometheus
def test_prometheus_reads_ray_and_haproxy_under_the_services_labels(
    stand_in: StandIn, tmp_path: Path, soon: None
) -> None:
    service = find_service(stand_in.home)
    assert service is not None
    config = write_config(tmp_path / "prometheus", service, RULES, cluster="eu-1", namespace="chat")
    check_config(config)
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        found = until(lambda: len(both := series(url, "serve_app_test")) == 2 and both)
        assert {job: (one["instance"], one["value"]) for job, one in found.items()} == {
            "ray": (stand_in.addresses["ray"], "1"),
            "haproxy": (stand_in.addresses["haproxy"], "2"),
        }
        assert all((one["cluster"], one["namespace"]) == ("eu-1", "chat") for one in found.values())
        assert {one["value"] for one in series(url, "up").values()} == {"1"}
        until(lambda: series(url, "serve_app:sum").get("", {}).get("value") == "3")
    finally:
        process.terminate()
        process.wait(300)


@pytest.fixture
def observe(stand_in: StandIn) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "serve_app.launch.observe", "--home", str(stand_in.home)]
        process = subprocess.Popen(
            [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@needs_prometheus
@pytest.mark.slow
def test_it_follows_the_service_and_leaves_only_its_data(
    stand_in: StandIn, observe: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = observe("--port", free_port(), "--json")
    ready = first_line(process)
    assert (ready["cluster"], ready["namespace"]) == ("local", "default")
    assert {one["job"]: one["address"] for one in ready["targets"]} == stand_in.addresses
    url = ready["prometheus_url"]
    until(lambda: series(url, "serve_app_test").get("ray", {}).get("value") == "1")
    groups = httpx.get(f"{url}/api/v1/rules", trust_env=False, timeout=60).json()["data"]["groups"]
    assert any(rule["type"] == "alerting" for group in groups for rule in group["rules"])

    address, stop = exporter(5)
    try:
        stand_in.start(tmp_path / "sa-2", address, stand_in.addresses["haproxy"])
        until(lambda: series(url, f'serve_app_test{{instance="{address}"}}').get("ray", {}).get("value") == "5")
    finally:
        stop()

    second = observe("--port", free_port())
    assert "another `make observe` uses" in second.communicate(timeout=120)[1]
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0
    assert [path.name for path in (stand_in.home / "observe").iterdir()] == ["data"]
    assert children
    assert not any(child.is_running() for child in children)


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of a start that fails, in this process."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def refuses(home: Path, port: int | str) -> str:
        assert main(["--home", str(home), "--port", str(port)]) == 1
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        return told.err

    return refuses


def test_what_is_missing_is_said_in_one_line(
    stand_in: StandIn, refuses: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        assert "apt-get install prometheus" in refuses(stand_in.home, free_port())
    if shutil.which("prometheus"):
        assert f"no running service uses the state folder {tmp_path}" in refuses(tmp_path, free_port())
        (tmp_path / "sa-1" / "ray" / "session_latest" / "prom_metrics_service_discovery.json").unlink()
        assert "--no-dashboard" in refuses(stand_in.home, free_port())


@needs_prometheus
def test_a_taken_port_is_said(stand_in: StandIn, refuses: Callable[..., str]) -> None:
    taken = stand_in.addresses["ray"].rsplit(":")[1]
    assert f"port {taken} is taken" in refuses(stand_in.home, taken)


@needs_prometheus
@pytest.mark.slow
def test_a_grafana_gets_the_dashboards_and_this_prometheus(
    stand_in: StandIn, observe: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with FakeGrafana() as grafana:
        options = ("--grafana", grafana.url, "--token-file", tmp_path / "token")
        ready = first_line(observe("--port", free_port(), "--json", *options))
        assert grafana.datasources[-1]["url"] == ready["prometheus_url"]
        assert "serve-app-users" in grafana.dashboards


@needs_prometheus
@pytest.mark.slow
def test_dashboards_that_can_not_be_pushed_are_said(
    stand_in: StandIn, observe: Callable[..., subprocess.Popen[str]]
) -> None:
    process = observe("--port", free_port(), "--grafana", f"http://127.0.0.1:{free_port()}", "--token-file", os.devnull)
    assert "the dashboards were not pushed" in process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert list((stand_in.home / "observe").iterdir()) == []


def test_a_service_that_has_stopped_is_not_found(stand_in: StandIn) -> None:
    assert find_service(stand_in.home) is not None
    lock = stand_in.home / "run" / "lock"
    lock.write_text("process 999999999")
    assert find_service(stand_in.home) is None
    lock.write_text(f"process {os.getpid()}")
    (stand_in.home / "logs" / "ray").unlink()
    assert find_service(stand_in.home) is None


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        (":9101", "127.0.0.1:9101"),
        ("0.0.0.0:1", "127.0.0.1:1"),
        (":::9101", "[::1]:9101"),
        ("10.0.0.1:9101", "10.0.0.1:9101"),
    ],
)
def test_the_address_of_haproxys_metrics_is_that_of_its_configuration(
    stand_in: StandIn, tmp_path: Path, bind: str, address: str
) -> None:
    stand_in.start(tmp_path / "sa-2", "127.0.0.1:1", bind)
    service = find_service(stand_in.home)
    assert service is not None
    assert service.haproxy == address


def test_a_service_without_haproxy_has_rays_targets_alone(stand_in: StandIn, tmp_path: Path) -> None:
    (tmp_path / "sa-1" / "ha" / "a1b2" / "haproxy.cfg").unlink()
    service = find_service(stand_in.home)
    assert service is not None
    assert [target["job"] for target in service.targets()] == ["ray"]
    config = write_config(tmp_path / "prometheus", service, RULES)
    assert json.loads((config.parent / "haproxy.json").read_text()) == [{"targets": []}]


@pytest.mark.parametrize("name", ["", "a b", "${x}", "a\nb"])
def test_a_label_that_prometheus_would_read_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="cluster"):
        write_config(tmp_path, Service(tmp_path / "none", None), RULES, cluster=name)


def test_rays_dashboard_gets_the_addresses_of_grafana_and_prometheus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's dashboard is a descendant of the driver and reads them from its environment when Ray starts."""
    wanted = {
        "RAY_GRAFANA_HOST": "http://grafana:3000",
        "RAY_GRAFANA_IFRAME_HOST": "https://grafana.example.com",
        "RAY_PROMETHEUS_HOST": "http://127.0.0.1:9090",
        "RAY_PROMETHEUS_NAME": "serve-app Prometheus",
    }
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    environment = driver_environment(tmp_path / "home", tmp_path, free_port())
    assert {name: environment[name] for name in wanted} == wanted
