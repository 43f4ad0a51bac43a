"""`serve-app doctor --cluster` over a cluster of two nodes, and over none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.cluster_checks import flags_of
from serve_app.launch.preflight import free_port

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.service]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve_app.cli", "doctor", "--cluster", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Its head has the flags of flags.env, its worker has one otherwise."""
    from ray.cluster_utils import Cluster  # loads Ray

    flags = dict(flags_of((ROOT / "cluster/flags.env").read_text()))
    patch = pytest.MonkeyPatch()
    for name, value in flags.items():
        patch.setenv(name, value)
    patch.delenv("SERVE_APP_DATABASE_URL", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        patch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()
        patch.undo()


def test_every_node_is_asked_and_what_differs_fails(address: str) -> None:
    done = doctor("--address", address, "--json")
    document: Any = json.loads(done.stdout)
    statuses = {one["name"]: one["status"] for one in document["checks"]}
    details = {one["name"]: one["detail"] for one in document["checks"]}
    assert (done.returncode, document["ok"]) == (1, False), done.stderr
    assert details["nodes"] == "2 answer"
    assert statuses["flags"] == "fail"
    assert "RAY_SERVE_HAPROXY_MAXCONN: " in details["flags"]
    assert "7 on " in details["flags"]
    # One machine has one clock and one installation.
    assert {statuses[name] for name in ("versions", "clocks", "TLS", "GPU drivers", "times")} == {"ok"}
    assert "GCS on port " in details["ports"]
    assert statuses["files"] == "fail"
    assert "/tmp/ray on " in details["files"]  # where a plain `ray start` has it
    assert statuses["applications"] == "warn"


def test_without_a_cluster_the_error_says_what_to_do() -> None:
    done = doctor("--address", f"127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no Ray cluster can be reached: nothing answers at 127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1, os.linesep
