"""Prints facts about a running cluster as one JSON document: `python -m deployments.cluster_facts`.

`serve-app doctor --cluster` runs it and evaluates the output (serve_app/cli/cluster_checks.py). Exit status 3 means
that there is no cluster; the reason is on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from ipaddress import ip_address
from typing import Any

import ray
from ray._private import ray_constants, services
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.node_facts import Facts, Node
from deployments.strict_config import GATEWAY, MODEL
from serve_app.times import STOPS, longest_reply_s

NODE_S = 60.0  # a node's first task may have to start its first Python process
CLOCK_ROUNDS = 7
LIMITER_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.cluster_facts", description=__doc__)
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS") or "auto", help="HOST:PORT of the head")
    options = parser.parse_args()
    try:
        address = _address(options.address)
        _expect_listener(address)
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's errors for a missing cluster have no common class
        print((str(error).splitlines() or [type(error).__name__])[0], file=sys.stderr)
        return 3
    try:
        print(json.dumps(gather()), flush=True)
    finally:
        ray.shutdown()
    return 0


def gather() -> Facts:
    """Returns the facts about the cluster that this process is connected to."""
    applications = _applications()
    configs = {name: one.get("deployed_app_config") or {} for name, one in applications.items()}
    models = [one.get("args") or {} for one in configs.values() if one.get("import_path") == MODEL]
    gateway = next((one.get("args") or {} for one in configs.values() if one.get("import_path") == GATEWAY), None)
    replicas = [
        replica["node_id"]
        for application in applications.values()
        for name, deployment in application["deployments"].items()
        if name == "Model"
        for replica in deployment["replicas"]
        if replica.get("node_id")
    ]
    nodes = [
        {
            "id": node["NodeID"],
            "name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})",
            "is_head": "node:__internal_head__" in node["Resources"],
            "gpus": node["Resources"].get("GPU", 0.0),
            "model_replicas": replicas.count(node["NodeID"]),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    # All nodes in parallel: nodes that do not answer delay the result by one timeout in total.
    actors = [_actor(node["id"]) for node in nodes]
    asked = [actor.facts.remote(models, gateway) for actor in actors]
    deadline = time.monotonic() + NODE_S
    for node, actor, answer in zip(nodes, actors, asked, strict=True):
        try:
            node |= ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
            node |= _clock(actor)
        except Exception as error:  # any error concerns only this node
            node["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    _relative_to_head(nodes)
    return {
        "now": time.time(),
        "nodes": nodes,
        "applications": {name: one["status"] for name, one in applications.items()},
        "limiters": {name: _limiter_error(name) for name in _limiters(applications)},
        "times": _times(applications),
    }


def _address(given: str) -> str:
    """Returns HOST:PORT of the head. `given` may be "auto". Raises ConnectionError if there is no cluster.

    On Linux, Ray (2.60) would replace a loopback address with the machine's other address, where `make serve` does not
    listen. This function turns that off.
    """
    address: str = services.get_ray_address_from_environment(given, None)
    with contextlib.suppress(ValueError):  # the host is a name, not an address
        if ip_address(address.rpartition(":")[0].strip("[]")).is_loopback:
            ray_constants.ENABLE_RAY_CLUSTER = False
    return address


def _expect_listener(address: str) -> None:
    """Raises ConnectionError if nothing listens at the address.

    Ray itself would retry for a long time and then end the process.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {address}: {error.strerror or error}") from None


def _actor(node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Node).options(num_cpus=0, scheduling_strategy=here).remote()


def _clock(actor: Any) -> Facts:
    """Returns by how many seconds the node's clock is ahead of this process's clock, and the maximum error.

    Uses the quickest of several calls. The maximum error is half of that call's duration.
    """
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        asked, began = time.time(), time.monotonic()
        node_time = ray.get(actor.clock.remote(), timeout=10)
        took = time.monotonic() - began
        rounds.append((took, node_time - asked - took / 2))
    took, ahead = min(rounds)
    return {"clock_ahead_s": ahead, "clock_error_s": took / 2}


def _relative_to_head(nodes: list[Facts]) -> None:
    measured = [node for node in nodes if "clock_ahead_s" in node]
    for head in [node for node in measured if node["is_head"]]:
        ahead, error = head["clock_ahead_s"], head["clock_error_s"]
        for node in measured:
            node["clock_ahead_s"] -= ahead
            node["clock_error_s"] += error if node is not head else -error


def _applications() -> dict[str, Any]:
    """Returns the applications as Serve describes them; empty if Serve is not running."""
    client = _get_global_client(raise_if_no_controller_running=False)
    details: dict[str, Any] = client.get_serve_details() or {} if client is not None else {}
    return dict(details.get("applications", {}))


def _limiters(applications: dict[str, Any]) -> list[str]:
    deployments = applications.get("gateway", {}).get("deployments", {})
    return [name for name in deployments if name.partition("-")[0] == "Limiter"]


def _limiter_error(name: str) -> str:
    async def ask() -> None:
        async with asyncio.timeout(LIMITER_S):
            await DeploymentHandle(name, "gateway").address.remote()

    try:
        asyncio.run(ask())  # with a cluster's flags, a handle works only in an event loop
    except Exception as error:
        return (str(error).splitlines() or [""])[0] or type(error).__name__
    return ""


def _times(applications: dict[str, Any]) -> Facts:
    """Returns the timeouts that must form a chain (serve_app/times.py), each as a name and its seconds."""
    found: Facts = {"reply": [], "model": [], "gateway": []}
    for application, one in applications.items():
        for name, deployment in one["deployments"].items():
            config: Facts = deployment["deployment_config"]
            if name in ("Model", "Gateway"):
                found[name.lower()].append([f"{STOPS} of {application}.{name}", config[STOPS]])
            if name == "Gateway":
                found["reply"].append(["the longest reply", longest_reply_s(config.get("user_config") or {})])
    return found


if __name__ == "__main__":
    sys.exit(main())
