"""The service under test: started as an operator starts it, with a database, folder, port and Ray of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml
from sqlalchemy import make_url

from bench.harness.processes import Tree
from tests.service.chaos.database import Postgres
from tests.service.harness import trusted
from tests.service.started import PATIENT, TRIES, launch, was_too_slow

ROOT = Path(__file__).resolve().parents[3]
NANO = 10**9
BACKEND = "smollm2"
STUB = "stub"
STOP_S = 25.0
PRICE = {"input": "0.27", "cached_input": "0.07", "output": "1.10"}
PRICE_IN, PRICE_CACHED, PRICE_OUT = 270, 70, 1100  # the same in nano-units a token


class StandError(Exception):
    """The service did not start or did not reply; one line with the reason."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Configuration of what is started."""

    database: str = "sqlite"  # or postgresql
    limiter_shards: int = 1
    accounting_shards: int = 1
    gateways: int = 1
    stub: bool = False  # a backend without a model: starts in a moment and takes no processor time
    tls: bool = False  # https, with a certificate of an authority of its own
    models: int = 1  # replicas of the backend
    settings: dict[str, Any] = field(default_factory=dict)  # of the gateways' user_config, such as settle_timeout_s
    args: dict[str, Any] = field(default_factory=dict)  # of the gateway application, such as outage_grace_s
    tree: str = str(ROOT)  # the source: of another release, for example

    def config(self) -> dict[str, Any]:
        """The Serve config. Only what differs from the defaults is named."""
        config: dict[str, Any] = yaml.safe_load(Path(self.tree, "config.yaml").read_text())
        gateway, model, *_ = config["applications"]
        gateway["args"] |= {"lease_s": 6, "orphan_delay_s": 1, **self.args}
        shards = {"limiter_shards": self.limiter_shards, "accounting_shards": self.accounting_shards}
        gateway["args"] |= {name: count for name, count in shards.items() if count != 1}
        backend = STUB if self.stub else BACKEND
        for deployment in gateway["deployments"]:
            deployment.pop("user_config", None)  # every shard needs the same, and each account has limits of its own
            if deployment["name"] == "Gateway":
                deployment["num_replicas"] = self.gateways
                served = {"svc-chat": {"backends": {backend: 100}, "price": PRICE}}
                deployment["user_config"] = {"models": served, **self.settings}
        if self.stub:
            one = {"name": "Model", "num_replicas": self.models}
            model = {
                "name": STUB,
                "route_prefix": None,
                "import_path": "tests.service.chaos.stub:app",
                "deployments": [one],
            }
        else:
            one = model["deployments"][0]
            del one["autoscaling_config"]
            one |= {"num_replicas": self.models, "max_ongoing_requests": 512}
            one["ray_actor_options"] = {"num_cpus": 0.5}
        config["applications"] = [gateway, model]
        return config


class Stand:
    """One running service. A context manager: everything has ended after it.

    `beside` is another one, whose ledger and secrets this one has, too. `login` is the database user that this one has
    in place of the other's, and `operator_key` and `secret_key` are new ones: the other's are those before them. With
    `previous_secret_key` "" a secret before that the other one has is not valid here.
    """

    def __init__(
        self,
        shape: Shape,
        say: Callable[[str], None] = lambda _: None,
        beside: Stand | None = None,
        *,
        login: str = "",
        operator_key: str = "",
        secret_key: str = "",
        previous_secret_key: str | None = None,
    ) -> None:
        self.shape = shape
        self._beside = beside
        self._login = login
        self._new = {"operator-key": operator_key, "secret-key": secret_key}
        self._previous_secret_key = previous_secret_key
        self._say = say
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.home = self.folder / "home"
        self.keep = False  # the folder with its logs
        self.postgres: Postgres | None = None
        self.tree: Tree | None = None
        self.document: dict[str, Any] = {}
        self.verify: ssl.SSLContext | bool = True  # what its clients trust
        self._operator_key = ""
        self._http: httpx.Client | None = None

    @property
    def base_url(self) -> str:
        """Without a slash at its end."""
        return str(self.document["base_url"])

    @property
    def database_url(self) -> str:
        """As SQLAlchemy takes it."""
        if self._beside is not None:
            url = make_url(self._beside.database_url)
            return url.set(username=self._login or url.username).render_as_string(hide_password=False)
        return self.postgres.url if self.postgres is not None else f"sqlite:///{self.home / 'ledger.db'}"

    def __enter__(self) -> Stand:
        try:
            self._start()
        except BaseException:
            self.keep = True
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self.home.mkdir()
        if self._beside is not None:
            shutil.copytree(self._beside.home / "secrets", self.home / "secrets")
            for name, new in self._new.items():
                if new:
                    secret = self.home / "secrets" / name
                    secret.with_suffix(".previous").write_text(secret.read_text())
                    secret.write_text(new)
            if self._previous_secret_key is not None:
                previous = self.home / "secrets" / "secret-key.previous"
                previous.unlink(missing_ok=True)
                if self._previous_secret_key:
                    previous.write_text(self._previous_secret_key)
        elif self.shape.database == "postgresql":
            self._say("starting PostgreSQL")
            self.postgres = Postgres()
            self.postgres.start()
        if not self.shape.stub:
            self._borrow_model()
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self.shape.config(), sort_keys=False))
        command = [*launch(self.home), "--config", str(config)]
        if self.shape.tls:
            command.append("--tls")
        environment = {
            **os.environ,
            **PATIENT,
            "SERVE_APP_DATABASE_URL": self.database_url,
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment["PYTHONPATH"] = self.shape.tree  # for Ray's processes, too
        line = ""
        for tries_left in reversed(range(TRIES)):
            self._say("starting the service")
            self.tree = Tree(command, environment, self.folder / "launch.log", Path(self.shape.tree), piped=True)
            assert self.tree.root.stdout is not None
            line = self.tree.root.stdout.readline()  # the launcher bounds its own start
            if line or not tries_left or not was_too_slow(self.home):
                break
            self.tree.stop(STOP_S)
        if not line:
            raise StandError(f"the service did not start: {self.tree.last_lines()} (logs in {self.folder})")
        self.document = json.loads(line)
        self._operator_key = (self.home / "secrets" / "operator-key").read_text().strip()
        self.verify = trusted(self.document)
        self._http = httpx.Client(base_url=self.base_url, timeout=60, trust_env=False, verify=self.verify)

    def _borrow_model(self) -> None:
        """The bundled model is made once for all runs."""
        from serve_app.model.bundled import ensure_bundled_model

        kept = Path(os.environ.get("SERVE_APP_TEST_HOME", ROOT / ".serve-app" / "test"))
        kept.mkdir(parents=True, exist_ok=True)
        ensure_bundled_model(kept, self._say)
        (self.home / "models").symlink_to((kept / "models").absolute())

    def stop(self) -> None:
        """Ends everything; may be called again."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self.tree is not None:
            self._say("stopping the service")
            self.tree.stop(STOP_S)
            self.tree = None
        if self.postgres is not None:
            self.postgres.stop()
            self.postgres = None
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self, kind: str) -> list[int]:
        """Processes of one kind, of all its shards and replicas: only those that descend from this launcher."""
        title = process_title(kind, STUB if self.shape.stub else BACKEND)
        assert self.tree is not None
        found = []
        for process in self.tree.processes():
            try:
                name = " ".join(process.cmdline()) or process.name()
            except Exception:  # it has just ended
                continue
            if title.match(name):
                found.append(process.pid)
        return sorted(found)

    def scale_gateways(self, **options: Any) -> None:
        """Changes `num_replicas` or `autoscaling_config` of the gateways, as `serve deploy` of a new file does."""
        config = yaml.safe_load((self.home / "run" / "config.yaml").read_text())
        [gateway] = [one for one in config["applications"][0]["deployments"] if one["name"] == "Gateway"]
        for option in ("num_replicas", "autoscaling_config"):
            gateway.pop(option, None)
        gateway |= options
        changed = self.folder / "changed.yaml"
        changed.write_text(yaml.safe_dump(config, sort_keys=False))
        # Without a dashboard there is no `serve deploy`. `serve run` hands the file to the controller that runs.
        command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(changed)]
        environment = {**os.environ, **self._ray(), "PYTHONPATH": self.shape.tree}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        if done.returncode:
            raise StandError(f"the gateways were not scaled: {done.stderr[-500:]}")

    def _ray(self) -> dict[str, str]:
        """Returns the variables by which Ray's commands reach the running service."""
        assert self.tree is not None
        for process in self.tree.processes():
            if process.name() == "raylet":
                [address] = (one for one in process.cmdline() if one.startswith("--gcs-address="))
                return {
                    "RAY_ADDRESS": address.partition("=")[2],
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN_PATH": str(self.home / "secrets" / "ray-token"),
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                }
        raise StandError("no raylet runs")

    def admin(self, method: str, path: str, body: Any = None, *, patience_s: float = 90.0) -> dict[str, Any]:
        """An operator's call, repeated under one idempotency key until it succeeds. Raises StandError.

        Threads may share it.
        """
        assert self._http is not None
        headers = {"authorization": f"Bearer {self._operator_key}", "idempotency-key": os.urandom(16).hex()}
        deadline = time.monotonic() + patience_s
        while True:
            try:
                answer = self._http.request(method, path, json=body, headers=headers)
                if answer.is_success:
                    return dict(answer.json())
                problem = f"{answer.status_code}: {answer.text}"
                if answer.status_code < 500:
                    raise StandError(f"{method} {path}: {problem}")
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise StandError(f"{method} {path} did not succeed within {patience_s:.0f} s: {problem}")
            time.sleep(0.2)

    def facts(self) -> dict[str, Any]:
        """The shape, for a report."""
        return asdict(self.shape)


def process_title(kind: str, backend: str) -> re.Pattern[str]:
    """Matches what Ray calls the replicas of a kind: `ray::ServeReplica:application:deployment`, shards numbered.

    While a process runs a method, its name follows after a dot or a colon.
    """
    application = backend if kind == "model" else "gateway"
    return re.compile(rf"ray::ServeReplica:{application}:{kind}([-_]?\d+)?($|[:. ])", re.IGNORECASE)


class Customer:
    """An account with a key, and what was credited to it."""

    def __init__(self, stand: Stand, name: str, credit: int) -> None:
        self._stand = stand
        self._lock = threading.Lock()
        limits = {"rpm": 10**9, "tpm": 10**12, "concurrency": 10**6}  # no test here is about rates
        body = {"name": name, "credit": as_amount(credit), **limits} if credit else {"name": name, **limits}
        self.id: str = stand.admin("POST", "/admin/accounts", body)["id"]
        self.credited = credit  # nano-units
        self.key, self.key_id = self.new_key()

    def new_key(self) -> tuple[str, str]:
        """Another key and its id."""
        made = self._stand.admin("POST", f"/admin/accounts/{self.id}/keys", {"name": "bench"})
        return made["key"], made["id"]

    def show(self) -> dict[str, Any]:
        """As the operator sees it."""
        return self._stand.admin("GET", f"/admin/accounts/{self.id}")

    def top_up(self, amount: int) -> None:
        """Booked exactly once: the call is repeated under one idempotency key."""
        self._stand.admin("POST", f"/admin/accounts/{self.id}/credit", {"amount": as_amount(amount)})
        with self._lock:
            self.credited += amount


def as_amount(nano: int) -> str:
    """Nano-units as the API writes money."""
    return f"{nano // NANO}.{nano % NANO:09d}"


def as_nano(amount: str) -> int:
    """Nano-units of what the API writes, also of negative amounts."""
    whole, _, fraction = amount.lstrip("-").partition(".")
    nano = int(whole) * NANO + int(fraction.ljust(9, "0") or 0)
    return -nano if amount.startswith("-") else nano
