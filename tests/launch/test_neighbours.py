"""Services side by side on one machine: nothing of one ever listens or asks where another one does."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from serve_app.launch.__main__ import Launch
from serve_app.launch.preflight import free_port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    launch = Launch(argparse.Namespace(home=tmp_path / "home", port="8000", config=tmp_path / "config.yaml"))
    launch.haproxy_port = free_port()
    return launch._environment(tmp_path)


@pytest.mark.parametrize(
    ("name", "usual"),
    [("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "8500"), ("RAY_SERVE_FALLBACK_PROXY_GRPC_PORT", "9500")],
)
def test_while_no_gateway_runs_requests_do_not_go_to_another_services_proxy(
    environment: dict[str, str], name: str, usual: str
) -> None:
    assert environment[name] != usual
    assert environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] != environment["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"]
