"""Tests of the settings that the launcher passes to HAProxy through Serve."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from serve_app.launch import driver
from tests.cluster.checks import flags


def test_heads_that_do_not_end_have_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_RETRY_ON", raising=False)
    given = driver.driver_environment(tmp_path, tmp_path, 9101)
    assert given["RAY_SERVE_HAPROXY_RETRY_ON"].splitlines() == ["conn-failure", "    timeout http-request 10s"]


def test_clusters_have_the_same_setting() -> None:
    assert flags()["RAY_SERVE_HAPROXY_RETRY_ON"] == driver.HAPROXY_RETRY_ON


@pytest.mark.parametrize(
    ("files", "most"), [(resource.RLIM_INFINITY, 20_000), (10**6, 20_000), (11_000, 4000), (64, 100)]
)
def test_haproxy_is_given_no_more_connections_than_the_system_has_files(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert driver.most_connections() == most
