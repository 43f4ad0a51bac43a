"""The nodes: which roles each one has, and how Ray is started on it. As in cluster/, each role has its own secrets."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.service.chaos.stand import ROOT
from tests.service.drill.network import GATE, SUBNET, Machine

REDIS_PORT: Final = 6390
HEAD: Final = "head"
#: As the pods of cluster/kubernetes/production: each role has nodes of its own, and the head has none.
ROLES: Final = {f"{role}{number}": role for role in ("gateway", "accounting", "model") for number in (1, 2)}
#: All machines share this one's cores: one that generates must not keep another from starting. Where Linux shares them
#: by session (autogroup), it takes no notice of a process's niceness beyond its session.
GIVE_WAY: Final = "renice -n 10 $$; [ ! -e /proc/self/autogroup ] || echo 10 > /proc/self/autogroup"
#: The first machine of a node has the first address, one that takes over beside it the next, and so on in turn.
ADDRESSES: Final = {
    HEAD: (f"{SUBNET}.10",),
    **{name: (f"{SUBNET}.{tens}0", f"{SUBNET}.{tens}1") for tens, name in enumerate(ROLES, 2)},
}
GATEWAYS: Final = [address for name, role in ROLES.items() if role == "gateway" for address in ADDRESSES[name]]


@dataclass(slots=True)
class Node:
    """One machine with Ray."""

    name: str
    address: str
    machine: Machine


@dataclass(slots=True)
class Secrets:
    """Secrets of one cluster."""

    ray_token: str = field(default_factory=lambda: secrets.token_hex(32))
    operator_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))


class Nodes:
    """Starts them. Each machine begins as a new pod: an empty disk, and the shared weights. Spools go with it."""

    def __init__(self, folder: Path, weights: Path, known: Secrets, database_url: str) -> None:
        self._folder = folder
        self._weights = weights
        self._known = known
        self._database_url = database_url
        self._started = 0

    def start(self, name: str, address: str) -> Node:
        self._started += 1
        place = self._folder / f"{self._started:03d}-{name}"
        temporary, state = place / "tmp", place / "state"
        temporary.mkdir(parents=True)
        state.mkdir()
        for shared in ("models", "cache"):
            (state / shared).symlink_to(self._weights / shared)
        flags = "--object-manager-port=8076 --metrics-export-port=8080 --num-gpus=0 --disable-usage-stats "
        flags += f"--node-ip-address={address} --object-store-memory=100000000 --include-log-monitor=false "
        if name == HEAD:
            flags += "--head --port=6379 --num-cpus=0 --dashboard-host=0.0.0.0"
        else:
            resources = json.dumps({ROLES[name]: 1})
            flags += f"--address={ADDRESSES[HEAD][0]}:6379 --num-cpus=1 --resources='{resources}'"
        ray = f"exec {Path(sys.executable).with_name('ray')} start --block {flags}"
        program = f"set -a; . {ROOT}/cluster/flags.env; set +a; export RAY_SERVE_HAPROXY_MAXCONN=2000; cd {ROOT}; {ray}"
        if ROLES.get(name) == "model":
            program = f"{GIVE_WAY}; {program}"
        return Node(name, address, Machine(address, program, self._environment(name, state), temporary, place / "log"))

    def _environment(self, name: str, state: Path) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SERVE_APP_"))}
        environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "SERVE_APP_HOME": str(state),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._known.ray_token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # as KubeRay sets it where there is fault tolerance
        }
        role = ROLES.get(name)
        if name == HEAD:
            environment |= {"RAY_REDIS_ADDRESS": f"{GATE}:{REDIS_PORT}", "RAY_external_storage_namespace": "drill"}
        if role == "gateway":
            operator, secret = self._known.operator_key, self._known.secret_key
            environment |= {"SERVE_APP_OPERATOR_KEY": operator, "SERVE_APP_SECRET_KEY": secret}
        if role == "accounting":
            environment |= {"SERVE_APP_DATABASE_URL": self._database_url}
        return environment
