"""RAY_USE_TLS: two nodes with certificates work together, and one without can't join.

Once with the files of `serve-app cluster certificates`, as on machines, and once with those of the init containers of
components/tls of cluster/kubernetes, at two addresses and a name in a network of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # what these tests use takes seconds to import, which all others of this folder would wait for
    from tests.cluster.manifests import Pool

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

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
    from ray.util import get_node_ip_address

    from tests.cli.test_cluster_certificates import variables

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


HEAD, WORKER, OTHER = "10.78.0.2", "10.78.0.3", "10.78.0.4"
NAME, UNKNOWN = "serve-app-x-head-svc.serve-app.svc.cluster.local", "head.example"
# As KubeRay does: a worker waits for the head by its name, then joins by it. All addresses are this one machine's.
PODS = """
import json, subprocess, sys

program, name, unknown, head_address, worker_address, other_address = sys.argv[1:7]
head, worker, plain = map(json.loads, sys.argv[7:])

def runs(environment, *arguments):
    try:
        return subprocess.run([program, *arguments], env=environment, stdout=2, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:  # it asks again and again
        return False

def joins(environment, *more):
    return runs(environment, "start", f"--address={name}:6379", "--num-cpus=1", "--disable-usage-stats",
                "--dashboard-agent-listen-port=52366", "--min-worker-port=20000", "--max-worker-port=20999", *more)

assert runs(head, "start", "--head", "--port=6379", f"--node-ip-address={head_address}", "--num-cpus=1",
            "--include-dashboard=false", "--disable-usage-stats")
found = {
    "by name": runs(worker, "health-check", f"--address={name}:6379"),
    "without": runs(plain, "health-check", f"--address={name}:6379"),
    "by a name that is not in the certificate": runs(worker, "health-check", f"--address={unknown}:6379"),
    "worker joined": joins(worker, f"--node-ip-address={worker_address}"),
}
driver = subprocess.run([sys.executable, "-c", sys.stdin.read(), f"{name}:6379"], env=head, stdout=subprocess.PIPE)
found["sizes"] = json.loads(driver.stdout.splitlines()[-1])
found["joined without"] = joins(plain, f"--node-ip-address={other_address}")
print(json.dumps(found))
"""
DRIVER = """
import json, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
whole, size = ray.put(bytes(2**21)), ray.remote(num_cpus=0)(lambda found: len(found))
nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
on = {address: size.options(scheduling_strategy=On(node, soft=False)).remote(whole) for address, node in nodes.items()}
print(json.dumps({address: ray.get(one) for address, one in on.items()}))
"""
NAMESPACES = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def pod_environment(pool: Pool, fields: dict[str, str], folder: Path) -> dict[str, str]:
    """Makes the certificate by the init container's own command; returns what Ray's container gets in the manifest.

    `fields` are the variables that Kubernetes and KubeRay fill in. `folder` is where the pod's disk begins.
    """
    from tests.cluster.certificate_rules import maker_of

    maker = maker_of(pool)
    assert maker is not None
    known = {one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in maker["env"]} | fields
    words = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], one) for one in [*maker["command"], *maker["args"]]]
    command = [sys.executable, "-m", "serve_app.cli", *(one.replace("=/etc/", f"={folder}/etc/") for one in words[1:])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = {name: one["value"] for name, one in pool.env.items() if name.startswith("RAY_") and "value" in one}
    return {name: re.sub("^/etc/", f"{folder}/etc/", value) for name, value in given.items()}


@pytest.mark.skipif(
    subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0, reason="unshare makes no namespaces"
)
def test_pods_of_the_manifest_work_together_by_their_addresses_and_the_heads_name(tmp_path: Path) -> None:
    from tests.cluster.manifests import read_set

    made = [sys.executable, "-m", "serve_app.cli", "cluster", "certificates", "--out", str(tmp_path / "authority")]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environments = []
    pools = {pool.name: pool for pool in read_set("production").pools}
    for pool, address in ((pools["head"], HEAD), (pools["l40s"], WORKER)):
        disk = tmp_path / pool.name
        (disk / "etc" / "serve-app").mkdir(parents=True)
        (disk / "etc" / "serve-app" / "authority").symlink_to(tmp_path / "authority")
        fields = {"status.podIP": address, "status.podIPs": address, "FQ_RAY_IP": NAME}
        environments.append(plain | pod_environment(pool, fields, disk))
    hosts, printed = tmp_path / "hosts", tmp_path / "printed"
    hosts.write_text(f"127.0.0.1 localhost\n{HEAD} {NAME} {UNKNOWN}\n")
    network = f"ip link set lo up && for one in {HEAD} {WORKER} {OTHER}; do ip address add $one/32 dev lo; done"
    inside = f'{network} && mount --bind {hosts} /etc/hosts && exec "$@"'
    program = str(Path(sys.executable).with_name("ray"))
    values = [program, NAME, UNKNOWN, HEAD, WORKER, OTHER, *(json.dumps(one) for one in (*environments, plain))]
    with printed.open("wb") as output:
        command = [*NAMESPACES, "bash", "-c", inside, "bash", sys.executable, "-c", PODS, *values]
        subprocess.run(command, input=DRIVER.encode(), stdout=output, env=plain, timeout=400, check=True)
    assert json.loads(printed.read_text().splitlines()[-1]) == {
        "by name": True,
        "without": False,
        "by a name that is not in the certificate": False,
        "worker joined": True,
        "sizes": {HEAD: 2**21, WORKER: 2**21},
        "joined without": False,
    }
