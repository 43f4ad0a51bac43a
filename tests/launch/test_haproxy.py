"""HAProxy's exporter listens on this machine alone, and its statistics nowhere, whatever Ray's template says."""

from __future__ import annotations

import json
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from serve_app.api import errors
from serve_app.launch import haproxy_config
from serve_app.launch.driver import driver_environment
from serve_app.launch.preflight import LaunchError, free_port


@pytest.fixture
def config(tmp_path: Path) -> HAProxyConfig:
    return HAProxyConfig(
        metrics_port=free_port(),
        stats_port=free_port(),
        socket_path=str(tmp_path / "admin.sock"),
        http_options=HTTPOptions(port=free_port()),
        enable_hap_optimization=False,
    )


def listening(process: psutil.Process, ports: set[int]) -> set[tuple[str, int]]:
    """Addresses on which it listens by now, of these ports."""
    found = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {(address.ip, address.port) for address in found if address.port in ports}


def test_a_lanes_refusal_is_the_services_503() -> None:
    body = json.loads(haproxy_config._BUSY)
    message = body["error"]["message"]
    assert body == errors.overloaded(message, retry_after_s=5).body()


@pytest.fixture
def started(tmp_path: Path, config: HAProxyConfig) -> Iterator[psutil.Process]:
    """HAProxy, by the program and with the configuration that Ray would take."""
    environment = driver_environment(tmp_path / "home", tmp_path, config.metrics_port)
    path = tmp_path / "haproxy.cfg"
    HAProxyApi(cfg=config, backend_configs={}, config_file_path=str(path))._generate_config_file_internal()
    assert f"bind :{config.metrics_port}" in path.read_text()
    assert f"bind *:{config.stats_port}" in path.read_text()
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield psutil.Process(process.pid)
        process.terminate()


def test_only_haproxys_own_user_can_use_its_control_socket(started: psutil.Process, config: HAProxyConfig) -> None:
    deadline = time.monotonic() + 60
    while not Path(config.socket_path).is_socket():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert stat.S_IMODE(Path(config.socket_path).stat().st_mode) == 0o600


def test_the_exporter_is_local_and_the_statistics_are_off(started: psutil.Process, config: HAProxyConfig) -> None:
    ports = {config.metrics_port, config.stats_port}
    deadline = time.monotonic() + 60
    while not (found := listening(started, ports)):
        assert time.monotonic() < deadline
        assert started.status() != psutil.STATUS_ZOMBIE, "HAProxy refuses the configuration"
        time.sleep(0.02)
    assert found == {("127.0.0.1", config.metrics_port)}
    # Ray finds its processes by the path of the configuration.
    assert str(Path(started.cmdline()[0]).name) == "haproxy"
    assert started.cmdline()[-1].endswith("haproxy.cfg")


def test_another_address_can_be_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HAPROXY_HOST", "0.0.0.0")
    environment = driver_environment(tmp_path / "home", tmp_path, free_port())
    assert '"$3" 0.0.0.0 ' in Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).read_text()


def test_what_is_no_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_HAPROXY_HOST", "localhost/e;reboot")
    with pytest.raises(LaunchError, match="SERVE_APP_HAPROXY_HOST"):
        driver_environment(tmp_path / "home", tmp_path, free_port())


def test_the_numbers_of_lanes_reach_haproxy_and_it_logs_no_path_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_LANES", "at_once=7 delay_ms=20")
    wrapper = driver_environment(tmp_path / "home", tmp_path, free_port())["RAY_SERVE_HAPROXY_BINARY_PATH"]
    file = tmp_path / "haproxy.cfg"
    file.write_text("frontend http_frontend\n    bind :80\n    use_backend a if TRUE\nbackend a\n")
    command = Path(wrapper).read_text().replace("exec ", "true ")
    subprocess.run(["sh", "-c", command, "haproxy", "-db", "-f", str(file)], check=True)
    assert " maxconn 7 " in file.read_text()
    assert " inspect-delay 20ms" in file.read_text()
    assert " set-log-level silent if { path_sub /first/ /invitations/ /reset/ /sign-up/ }" in file.read_text()


def test_a_wrong_number_of_lanes_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_LANES", "at_once=0")
    with pytest.raises(LaunchError, match="SERVE_APP_LANES: 'at_once=0' is not NAME=NUMBER"):
        driver_environment(tmp_path / "home", tmp_path, free_port())
