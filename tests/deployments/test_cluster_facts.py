"""Tests of the facts for `doctor --cluster` that need no cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import ray_constants, services

from deployments.cluster_facts import _address
from deployments.node_facts import _open_paths


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "[::1]:6379", "10.0.0.1:6379", "head.example:6379"])
def test_ray_connects_to_the_address_that_is_given(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    found = services.canonicalize_bootstrap_address(_address(address))
    assert found == address.replace("[::1]", "127.0.0.1")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's folders, which other users may enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    for name in ("home", "tmp", "tmp/ray", "tmp/ha/node"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp" / "ha" / "node" / "admin.sock").touch()
    for path in folder.rglob("*"):
        path.chmod(0o755)
    monkeypatch.setenv("SERVE_APP_HOME", str(folder / "home"))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "tmp" / "ha" / "admin.sock"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    context = SimpleNamespace(get_temp_dir=lambda: str(folder / "tmp" / "ray"))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    yield folder
    shutil.rmtree(folder)


def test_what_other_users_of_a_node_can_reach_is_named(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [node / name for name in ("home", "tmp/ray", "tmp/ha/node/admin.sock")]
    assert [*_open_paths(None)] == [str(path) for path in paths]
    (node / "tmp").chmod(0o700)
    assert [*_open_paths(None)] == [str(node / "home")]
    assert [*_open_paths({"home": str(node / "none")})] == []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # a container has no other users
    assert [*_open_paths(None)] == []
