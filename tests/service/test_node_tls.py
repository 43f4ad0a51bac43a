"""RAY_USE_TLS with the files of `serve-app cluster certificates`: two nodes work, and one without them can't join."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from tests.cli.test_cluster_certificates import variables

pytestmark = [pytest.mark.service, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# A process of its own: Ray reads its variables once. Each result of a node's task has crossed to it and back.
CLUSTER = """
import json, os, subprocess, sys
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

own, plain, program = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
try:
    os.environ.update(own)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    whole, size = ray.put(bytes(2**21)), ray.remote(num_cpus=0)(lambda found: len(found))
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    sizes = [ray.get(size.options(scheduling_strategy=On(node, soft=False)).remote(whole)) for node in nodes]
    command = [program, "start", "--address", cluster.address, "--num-cpus", "1", "--disable-usage-stats"]
    try:
        joined = subprocess.run(command, env=plain, stdout=2, timeout=40).returncode == 0
    except subprocess.TimeoutExpired:  # it asks again and again
        joined = False
    alive = sum(node["Alive"] for node in ray.nodes())
    print(json.dumps({"sizes": sizes, "joined": joined, "alive": alive}))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_nodes_with_certificates_work_together_and_one_without_does_not_join(tmp_path: Path) -> None:
    address = get_node_ip_address()  # where Ray reaches this machine
    command = [sys.executable, "-m", "serve_app.cli", "cluster", "certificates", "--out", str(tmp_path)]
    for name in ("head", "worker"):
        made = [*command, f"{name},{address}", "--installed-at", str(tmp_path / name)]
        done = subprocess.run(made, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_TLS", "RAY_USE_TLS"))}
    head, worker = (variables(tmp_path / name) for name in ("head", "worker"))
    program = Path(sys.executable).with_name("ray")
    command = [sys.executable, "-c", CLUSTER, json.dumps(worker), json.dumps(plain), str(program)]
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        process = subprocess.Popen(command, env={**plain, **head}, stdout=output, start_new_session=True)
        try:
            assert process.wait(300) == 0
        finally:  # Ray's processes, should it not end in order
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    found = json.loads(printed.read_text().splitlines()[-1])
    assert found == {"sizes": [2**21] * 2, "joined": False, "alive": 2}
