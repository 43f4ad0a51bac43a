"""The systems that are compared: how each is started, what it is told, which key opens it."""

from __future__ import annotations

import json
import os
import secrets as random_secrets
import shutil
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import yaml

from bench.engine.processes import Tree
from bench.gateway.request import BACKEND, MODEL, REPLY
from serve_app import secrets
from serve_app.launch.preflight import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
FULL, BARE, LITELLM = "full", "bare", "litellm"
SYSTEMS = (FULL, BARE, LITELLM)


class NotReady(Exception):
    """A system could not be started or answers otherwise than expected; one line with the end of its log."""


class System(ABC):
    """One system. `start` may be called again after `stop`."""

    name: str
    title: str
    patience_s = 25.0  # from the request to end until it is ended
    piped = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree: Tree | None = None
        self.port = 0
        self.key = ""

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Version and settings, for the notes."""

    @abstractmethod
    def prepare(self) -> list[str]:
        """Writes what it needs and returns the command; `self.port` is set."""

    @abstractmethod
    def wait_until_ready(self, tree: Tree) -> None:
        """Returns when all of it answers and `self.key` opens it. Raises NotReady."""

    def environment(self) -> dict[str, str]:
        """Of its processes."""
        return dict(os.environ)

    def start(self) -> None:
        """Returns when it answers. Raises NotReady."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        log = self.folder / f"{self.name}.log"
        log.write_bytes(b"")
        self.tree = Tree(self.prepare(), self.environment(), log, ROOT, piped=self.piped)
        try:
            self.wait_until_ready(self.tree)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all its processes."""
        if self.tree is not None:
            self.tree.stop(self.patience_s)
            self.tree = None

    def audit(self, answered: int, cut: int) -> dict[str, Any]:
        """What its books say of `answered` replies and at most `cut` requests that were cut; nothing without books."""
        return {}


class _OnServe(System):
    """Started by the launcher of `make serve`, so that both have the same Ray, HAProxy and flags."""

    piped = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = folder / f"{self.name}-home"

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The Serve configuration."""

    def prepare(self) -> list[str]:
        shutil.rmtree(self.home, ignore_errors=True)  # a new ledger for every turn
        self.home.mkdir(parents=True)
        path = self.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self.config(), sort_keys=False))
        command = [sys.executable, "-m", "serve_app.launch", "--json", "--no-dashboard", "--config", str(path)]
        return [*command, "--port", str(self.port), "--home", str(self.home)]

    def wait_until_ready(self, tree: Tree) -> None:
        assert tree.root.stdout is not None
        line = tree.root.stdout.readline()  # the launcher bounds its own start
        if not line:
            raise NotReady(f"{self.name} did not start: {tree.last_lines()}")
        self.key = json.loads(line)["api_key"]

    def _base_config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
        return config


def stub_application() -> dict[str, Any]:
    """The model stub as an application of its own, as models are."""
    deployment = {"name": "Stub", "num_replicas": 1}
    return {
        "name": BACKEND,
        "route_prefix": None,
        "import_path": "bench.gateway.stub:app",
        "deployments": [deployment],
    }


class Full(_OnServe):
    """The whole service as config.yaml has it, over the stub: keys, limits, holds and the ledger on SQLite."""

    name = FULL
    title = "serve-app"

    def config(self) -> dict[str, Any]:
        config = self._base_config()
        [gateway] = [one for one in config["applications"] if one["import_path"] == "serve_app.apps:gateway"]
        for deployment in gateway["deployments"]:
            user_config = deployment.get("user_config", {})
            if deployment["name"] == "Gateway":
                user_config["models"] = {MODEL: {**user_config["models"][MODEL], "backends": {BACKEND: 100}}}
            elif "contract" in user_config:  # the load is one account's
                user_config["contract"] = {"rpm": 10**7, "tpm": 10**10, "concurrency": 1024}
        config["applications"] = [gateway, stub_application()]
        return config

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": "this checkout", "ledger": "SQLite, WAL, synchronous=FULL"}

    def wait_until_ready(self, tree: Tree) -> None:
        super().wait_until_ready(tree)
        account = self._admin("/admin/accounts", {"name": "bench", "credit": "100000", "kind": "grant"})
        self.account = account["id"]
        self.key = self._admin(f"/admin/accounts/{self.account}/keys", {"name": "bench"})["key"]

    def audit(self, answered: int, cut: int) -> dict[str, Any]:
        """Every reply is in the ledger, nothing but what was cut beside them, and the books are sound."""
        deadline = time.monotonic() + 15  # what was cut is settled in the background
        while True:
            rows = self._admin(f"/admin/usage?account={self.account}&group_by=model")["data"]
            settled = sum(row["requests"] for row in rows)
            if answered <= settled <= answered + cut or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        sound = bool(self._admin("/admin/ledger/check")["ok"])
        exact = answered <= settled <= answered + cut
        return {"answered": answered, "cut_at_most": cut, "settled": settled, "exact": exact, "books_sound": sound}

    def _admin(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        operator = secrets.load(self.home).operator_key
        head = {"authorization": f"Bearer {operator}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.base_url + path, data, head), timeout=60) as answer:
            return dict(json.load(answer))


class Bare(_OnServe):
    """The same Serve without keys, limits and accounting; see bench.gateway.bare."""

    name = BARE
    title = "bare Ray Serve"

    def config(self) -> dict[str, Any]:
        config = self._base_config()
        bare = {
            "name": "bare",
            "route_prefix": "/",
            "import_path": "bench.gateway.bare:app",
            "deployments": [{"name": "Bare", "num_replicas": 1}],
        }
        config["applications"] = [bare, stub_application()]
        return config

    def prepare(self) -> list[str]:
        command = super().prepare()
        # The launcher makes no first account where it finds a key that opens `/models`: here any does.
        secrets.secret_file(self.home, "first-api-key", "sk-any")
        return command

    @property
    def facts(self) -> dict[str, Any]:
        return {"ingress": "bench/gateway/bare.py"}


class LiteLlm(System):
    """The LiteLLM proxy as its own guide for production sets it up, but for the database: its master key alone."""

    name = LITELLM
    title = "LiteLLM proxy"
    patience_s = 8.0

    def __init__(self, folder: Path, peer: dict[str, Any]) -> None:
        super().__init__(folder)
        self.peer = peer
        self.workers = len(os.sched_getaffinity(0))

    def prepare(self) -> list[str]:
        self.key = f"sk-{random_secrets.token_hex(16)}"
        model = {"model": f"openai/{MODEL}", "api_key": "none", "mock_response": REPLY}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": model}],
            "general_settings": {"master_key": self.key},
            "litellm_settings": {"telemetry": False, "set_verbose": False},
        }
        path = self.folder / f"{self.name}.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        program = Path(self.peer["python"]).with_name("litellm")
        command = [str(program), "--config", str(path), "--host", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--num_workers", str(self.workers)]

    def environment(self) -> dict[str, str]:
        own = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return {**super().environment(), **own, "PYTHONUNBUFFERED": "1"}  # its log tells when a worker is ready

    def wait_until_ready(self, tree: Tree) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if tree.root.poll() is not None:
                raise NotReady(f"{self.name} ended: {tree.last_lines()}")
            # One worker would answer while the others still load.
            started = tree.log.read_text(errors="replace").count("Proxy initialized")
            if started >= self.workers and self._is_alive():
                return
            time.sleep(0.3)
        raise NotReady(f"{self.name} was not ready within {START_S:.0f} s: {tree.last_lines()}")

    def _is_alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health/liveliness", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": self.peer["version"], "workers": self.workers, "database": "none", "mock_response": "yes"}


def find_systems(
    folder: Path, chosen: tuple[str, ...], peer: dict[str, Any] | None
) -> tuple[list[System], dict[str, str]]:
    """The chosen systems that are there, in the tables' order, and why the others aren't."""
    systems: list[System] = []
    missing: dict[str, str] = {}
    for name in SYSTEMS:
        if name not in chosen:
            continue
        if name == FULL:
            systems.append(Full(folder))
        elif name == BARE:
            systems.append(Bare(folder))
        elif peer is None:
            missing[name] = "not installed: make bench-gateway-peer"
        else:
            systems.append(LiteLlm(folder, peer))
    return systems, missing
