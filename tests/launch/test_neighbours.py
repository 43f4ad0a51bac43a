"""Several services on one machine use different ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.launch.driver import driver_environment
from serve_app.launch.preflight import free_port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return driver_environment(tmp_path / "home", tmp_path, free_port())


@pytest.mark.parametrize(
    ("name", "usual"),
    [("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "8500"), ("RAY_SERVE_FALLBACK_PROXY_GRPC_PORT", "9500")],
)
def test_while_no_gateway_runs_requests_do_not_go_to_another_services_proxy(
    environment: dict[str, str], name: str, usual: str
) -> None:
    assert environment[name] != usual
    assert environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] != environment["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"]
