"""The systems that are compared: how each is started and configured, and which key it accepts."""

from __future__ import annotations

import os
import secrets
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from bench.harness.processes import Tree
from bench.harness.servers import Launched, Server, ServerError, deployment, shipped_config
from bench.harness.stub_request import BACKEND, MODEL, REPLY, stub_application
from serve_app import secret_files

START_S = 120.0
FULL, BARE, LITELLM = "full", "bare", "litellm"
SYSTEMS = (FULL, BARE, LITELLM)


class System(Server):
    """A system that serves the requests of the load."""

    def audit(self, answered: int, cut: int) -> dict[str, Any]:
        """Compares its ledger to `answered` replies and up to `cut` cancelled requests. Returns {} without a ledger."""
        return {}


class _OnServe(Launched, System):
    def command(self) -> list[str]:
        shutil.rmtree(self.home, ignore_errors=True)  # a new ledger for every turn
        return super().command()


class Full(_OnServe):
    """The whole service with config.yaml and the stub: keys, limits, holds and the ledger on SQLite."""

    name = FULL
    title = "serve-app"

    def __init__(self, folder: Path, gateways: int = 1) -> None:
        """`gateways` is the number of gateway processes."""
        if gateways > 1:
            self.name, self.title = f"{FULL}-{gateways}", f"serve-app, {gateways} gateways"
        super().__init__(folder)
        self._gateways = gateways

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        deployment(config, "Gateway")["num_replicas"] = self._gateways
        settings = deployment(config, "Gateway")["user_config"]
        settings["models"] = {MODEL: {**settings["models"][MODEL], "backends": {BACKEND: 100}}}
        # One account sends the whole load.
        limits = deployment(config, "Limiter")["user_config"]
        limits["contract"] = {"rpm": 10**7, "tpm": 10**10, "concurrency": 1024}
        [gateway] = [one for one in config["applications"] if one["import_path"] == "deployments.apps:gateway"]
        config["applications"] = [gateway, stub_application()]
        return config

    @property
    def facts(self) -> dict[str, Any]:
        return {"version": "this checkout", "ledger": "SQLite, WAL, synchronous=FULL"}

    def wait_until_ready(self, tree: Tree) -> None:
        super().wait_until_ready(tree)
        deadline = time.monotonic() + START_S
        while len(self.admin("/admin/live")["gateways"]) < self._gateways:  # the launcher waits only for the first one
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: {self._gateways} gateways did not start within {START_S:.0f} s")
            time.sleep(0.5)
        self.account, self.key = self.new_account("bench", "100000")

    def audit(self, answered: int, cut: int) -> dict[str, Any]:
        """Checks that the ledger is sound and contains all `answered` replies.

        It may also contain up to `cut` cancelled requests.
        """
        deadline = time.monotonic() + 15  # cancelled requests are settled in the background
        while True:
            rows = self.admin(f"/admin/usage?account={self.account}&group_by=model")["data"]
            settled = sum(row["requests"] for row in rows)
            if answered <= settled <= answered + cut or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        sound = bool(self.admin("/admin/ledger/check")["ok"])
        exact = answered <= settled <= answered + cut
        return {"answered": answered, "cut_at_most": cut, "settled": settled, "exact": exact, "books_sound": sound}


class Bare(_OnServe):
    """Ray Serve without keys, limits and accounting: bench.gateway.bare."""

    name = BARE
    title = "bare Ray Serve"

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        bare = {
            "name": "bare",
            "route_prefix": "/",
            "import_path": "bench.gateway.bare:app",
            "deployments": [{"name": "Bare", "num_replicas": 1}],
        }
        config["applications"] = [bare, stub_application()]
        return config

    def command(self) -> list[str]:
        command = super().command()
        # The launcher creates no account if `/models` accepts the first key. This system accepts any key.
        secret_files.secret_file(self.home, "first-api-key", "sk-any")
        return command

    @property
    def facts(self) -> dict[str, Any]:
        return {"ingress": "bench/gateway/bare.py"}


class LiteLlm(System):
    """The LiteLLM proxy as in its guide for production, but without a database and with one master key."""

    name = LITELLM
    title = "LiteLLM proxy"
    patience_s = 8.0

    def __init__(self, folder: Path, peer: dict[str, Any]) -> None:
        super().__init__(folder)
        self.peer = peer
        self.workers = len(os.sched_getaffinity(0))

    def command(self) -> list[str]:
        self.key = f"sk-{secrets.token_hex(16)}"
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
        return {**super().environment(), **own, "PYTHONUNBUFFERED": "1"}  # its log shows when a worker is ready

    def wait_until_ready(self, tree: Tree) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if tree.root.poll() is not None:
                raise ServerError(f"{self.name} ended: {tree.last_lines()}")
            # One worker replies while the others still load.
            started = tree.log.read_text(errors="replace").count("Proxy initialized")
            if started >= self.workers and self._is_alive():
                return
            time.sleep(0.3)
        raise ServerError(f"{self.name} was not ready within {START_S:.0f} s: {tree.last_lines()}")

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
    folder: Path, chosen: tuple[str, ...], peer: dict[str, Any] | None, gateways: tuple[int, ...] = (1,)
) -> tuple[list[System], dict[str, str]]:
    """The chosen systems that are installed, in the tables' order, and why the others are missing.

    For each number of gateway processes in `gateways`, the service is a separate system.
    """
    systems: list[System] = []
    missing: dict[str, str] = {}
    for name in SYSTEMS:
        if name not in chosen:
            continue
        if name == FULL:
            systems += [Full(folder, count) for count in gateways]
        elif name == BARE:
            systems.append(Bare(folder))
        elif peer is None:
            missing[name] = "not installed: make bench-gateway-peer"
        else:
            systems.append(LiteLlm(folder, peer))
    return systems, missing
