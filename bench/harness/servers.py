"""A server that a benchmark starts, measures and stops. Our service is started by the launcher of `make serve`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import yaml

from bench.harness.command import ROOT, say
from bench.harness.processes import Tree
from serve_app import secret_files
from serve_app.launch.preflight import free_port
from serve_app.model.bundled import ensure_bundled_model


class ServerError(Exception):
    """A server could not be started, or does not reply as expected. The message may end with lines of its log."""


class Server(ABC):
    """One server. `start` may be called again after `stop`."""

    name: str
    title: str
    patience_s = 25.0  # maximum time to end after SIGINT
    piped = False  # standard output is read instead of logged

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree: Tree | None = None
        self.port = 0
        self.key = ""  # an API key, if the server requires one

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Version and settings, for the notes below the results."""

    @abstractmethod
    def command(self) -> list[str]:
        """Writes the server's files. Returns the command that starts it on `self.port`."""

    @abstractmethod
    def wait_until_ready(self, tree: Tree) -> None:
        """Waits until the server replies. Sets `self.key`. Raises ServerError."""

    def environment(self) -> dict[str, str]:
        """Returns the environment of the server's processes."""
        return dict(os.environ)

    def start(self) -> None:
        """Starts the server and waits until it replies. Raises ServerError."""
        self.port = free_port()
        log = self.folder / "logs" / f"{self.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        self.tree = Tree(self.command(), self.environment(), log, ROOT, piped=self.piped)
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


class Launched(Server):
    """Our service with a Serve configuration, started as by `make serve`."""

    piped = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = folder / f"{self.name}-home"

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The Serve configuration."""

    def command(self) -> list[str]:
        self.home.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self.config(), sort_keys=False))
        command = [sys.executable, "-m", "serve_app.launch", "--json", "--no-dashboard", "--config", str(path)]
        return [*command, "--port", str(self.port), "--home", str(self.home)]

    def wait_until_ready(self, tree: Tree) -> None:
        assert tree.root.stdout is not None
        line = tree.root.stdout.readline()  # no timeout here: the launcher limits its own start
        if not line:
            raise ServerError(f"{self.name} did not start: {tree.last_lines()}")
        self.key = json.loads(line)["api_key"]

    def admin(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Calls the operator API: POST if there is a body, else GET. Raises urllib.error.URLError."""
        operator = secret_files.secret_file(self.home, "operator-key")
        head = {"authorization": f"Bearer {operator}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.base_url + path, data, head), timeout=60) as answer:
            return json.load(answer)

    def new_account(self, name: str, credit: str, **fields: Any) -> tuple[str, str]:
        """Creates an account. Returns its id and key. The launcher's account has too little credit for many runs."""
        body = {"name": name, "credit": credit, "kind": "grant", **fields}
        account = str(self.admin("/admin/accounts", body)["id"])
        return account, str(self.admin(f"/admin/accounts/{account}/keys", {"name": "bench"})["key"])


class Bundled(Launched):
    """Our service with config.yaml and the bundled model. Each start has a new ledger."""

    title = "serve-app"

    def config(self) -> dict[str, Any]:
        return shipped_config()

    def command(self) -> list[str]:
        folder = ensure_bundled_model(self.folder / "home", say).parent  # converted once for all runs
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(mode=0o700, parents=True)
        (self.home / "models").symlink_to(folder.absolute())
        return super().command()

    @property
    def facts(self) -> dict[str, Any]:
        return {}


class OneReplica(Bundled):
    """Same as `Bundled`, but with exactly one replica: starting a second one would disturb a measurement."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        model = deployment(config, "Model")
        del model["autoscaling_config"]
        model["num_replicas"] = 1
        return config


def shipped_config() -> dict[str, Any]:
    """config.yaml of this checkout, without the console."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"] = [one for one in config["applications"] if one["name"] != "console"]
    return config


def deployment(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The deployment of this name, which the caller may change. Raises ValueError unless there is exactly one."""
    there = [one for application in config["applications"] for one in application["deployments"]]
    [found] = [one for one in there if one["name"] == name]
    assert isinstance(found, dict)
    return found
