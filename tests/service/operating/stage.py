"""A folder in which an operator works: the shipped config, the state folder below it, and a shell for its commands.

What runs is what the document has, but for `places`: its words for names, addresses, paths and days.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.cli.cluster_checks import flags_of
from serve_app.launch import laptop_tls
from serve_app.launch.preflight import free_port
from tests.service.harness import Service, until
from tests.service.operating.document import INLINE, SQL, Command

ROOT = Path(__file__).parents[3]
START_S, COMMAND_S = 900.0, 300.0
#: The stub replaces the model where a section is not about models: it starts in a moment.
STUB = {
    "name": "smollm2",
    "route_prefix": None,
    "import_path": "tests.service.chaos.stub:app",
    "deployments": [{"name": "Model", "graceful_shutdown_timeout_s": 600}],
}


@dataclass(frozen=True)
class Done:
    """A command that has run: as it was typed, and what it printed."""

    text: str
    out: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Step:
    """Test of a command. `code` is its exit status; `before` makes the trouble that it is for.

    `after` checks the result: it fails by an assertion, or by returning something that is false and not None.
    """

    after: Callable[[Done], object] = lambda _: None
    before: Callable[[], object] = lambda: None
    code: int = 0


class Stage:
    """`places` are regular expressions and what stands for them here, or a function that returns it, in order."""

    def __init__(self, folder: Path, model_path: Path, skipped: Iterable[str]) -> None:
        self.folder = folder
        self.home = folder / ".serve-app"
        self.port = free_port()
        self.places: dict[str, str | Callable[[], str]] = {}
        self.more: dict[str, str] = {}  # of the environment, such as the database's address
        self.programs = [str(Path(sys.executable).parent)]  # folders
        self.ran: dict[str, None] = {}  # the document's commands, in the order in which they ran
        self.used_places: set[str] = set()
        self._skipped = frozenset(skipped)
        self._model_path = model_path
        self._process: subprocess.Popen[str] | None = None
        self._service: Service | None = None
        (folder / "Makefile").symlink_to(ROOT / "Makefile")
        self.new_home()
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        config["http_options"]["port"] = self.port
        self.write_config(config)

    def new_home(self) -> None:
        """An empty state folder, but for what is made once from the model."""
        self.home.mkdir(mode=0o700)
        (self.home / "models").symlink_to(self._model_path.parent)
        (prepared := self._model_path.parents[1] / "cache").mkdir(exist_ok=True)
        (self.home / "cache").symlink_to(prepared)

    @property
    def config(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text())
        return document

    def write_config(self, document: dict[str, Any]) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def take_stub(self) -> None:
        """From the next start on."""
        gateway, *_ = self.config["applications"]
        self.write_config(self.config | {"applications": [gateway, STUB]})

    @property
    def service(self) -> Service:
        assert self._service is not None, "no service runs"
        return self._service

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment of an operator's shell. With a cluster's flags, `doctor --cluster` finds nothing."""
        foreign = ("MAKE", "MFLAGS", "SERVE_APP_")  # of the one who runs the tests: no state folder but this one's
        given = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        path = {"PATH": os.pathsep.join([*self.programs, given.get("PATH", "")])}
        flags = dict(flags_of((ROOT / "cluster/flags.env").read_text()))
        del flags["RAY_SERVE_HAPROXY_MAXCONN"]  # more connections than a small machine lets a process have files
        own = {"PORT": str(self.port), "PYTHONPATH": str(ROOT), "RAY_metrics_report_interval_ms": "1000"}
        return given | flags | own | path | self.more

    def placed(self, text: str) -> str:
        """With this test's names in place of the document's."""
        for pattern, place in self.places.items():
            if re.search(pattern, text):
                self.used_places.add(pattern)
                value = place if isinstance(place, str) else place()
                text = re.sub(pattern, lambda _, value=value: value, text)
        return text

    def run(self, commands: Iterable[Command], steps: Mapping[str, Step | Callable[[Done], object] | None]) -> None:
        """Runs a section. The step of a command is the one whose name is the longest beginning of it; None: not now.

        Each command must succeed, and each step be used. What stands in the text as code runs once in a section; if it
        ran before or is to be run elsewhere, it is a mention and runs only if it has a step.
        """
        section, used, seen = list(commands), set(), set[str]()
        blocks = {command.name for command in section if command.language != INLINE}
        for command in section:
            found = max((name for name in steps if command.name.startswith(name)), key=len, default=None)
            if command.name in self._skipped and found is None:
                continue
            if command.language == INLINE:
                if command.name in blocks | seen or (found is None and not self._is_new(command)):
                    continue
                seen.add(command.name)
            assert found is not None or command.language != "conf", f"settings that nothing uses:\n{command.text}"
            used.add(found)
            step = steps[found] if found is not None else Step()
            if step is None:
                continue
            self.run_one(command, step if isinstance(step, Step) else Step(step))
        assert not (left := set(steps) - used), f"the section has no command for these steps any more: {left}"

    def _is_new(self, command: Command) -> bool:
        """Returns whether it is new and more than the name of a command that runs with its arguments elsewhere."""
        return len(command.name.split()) > 3 and command.name not in self.ran

    def run_one(self, command: Command, step: Step) -> None:
        step.before()
        self.ran[command.name] = None
        for text in command.variants() if command.language != "conf" else [command.text]:
            if command.name.startswith("make serve"):
                done = self.start(text)
            elif command.language == "conf":
                done = Done(self.placed(text))
            elif command.language == "sql" or text.partition(" ")[0] in SQL:
                done = self.sql(self.placed(text))
            else:
                done = self.shell(text, step.code)
            seen = step.after(done)
            assert seen is None or seen, f"$ {done.text}\n{done.out}"

    def shell(self, text: str, code: int = 0) -> Done:
        typed = self.placed(text)
        environment = self.environment
        if "--cluster" in typed and self._process is not None:
            environment |= self._ray()
        done = subprocess.run(
            typed, shell=True, executable="/bin/bash", cwd=self.folder, env=environment, capture_output=True, text=True,
            timeout=COMMAND_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"$ {typed}\n{done.stdout}{done.stderr}"
        return Done(typed, done.stdout)

    def sql(self, statement: str) -> Done:
        """By the database's administrator."""
        raise AssertionError(f"no database runs for: {statement}")

    def start(self, text: str) -> Done:
        """`make serve`, until it says that it is ready. Nothing is installed: the tests' environment is there."""
        typed = text.replace("make ", f"make -o {sys.prefix}/.base VENV={sys.prefix} ")
        self.stop()
        self.more.pop("TLS", None)
        output = self.folder / "serve.log"
        with output.open("w") as file:
            self._process = subprocess.Popen(
                typed.split(), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, output.read_text()
            return "Ctrl-C stops everything" in output.read_text()

        until(ready, START_S)
        said = output.read_text()
        addresses = dict(re.findall(r"^ +(base address|metrics|Ray dashboard) +(\S+)", said, re.MULTILINE))
        self.more["RAY_DASHBOARD_ADDRESS"] = addresses["Ray dashboard"]
        document = {
            "base_url": addresses["base address"],
            "api_key": (self.home / "secrets" / "first-api-key").read_text().strip(),
            "metrics_url": addresses["metrics"],
            "haproxy_metrics_url": "",
            "dashboard_url": addresses["Ray dashboard"],
            "home": str(self.home),
        }
        self._service = Service(document, self._process)
        if "TLS=1" in text:
            self.more["TLS"] = "1"  # for `serve-app`
            trusted = str(laptop_tls.authority_file(self.home))
            self._service.http = httpx.Client(base_url=document["base_url"], timeout=120, verify=trusted)
        return Done(typed, said)

    def stop(self) -> None:
        """Ctrl-C. Checks that nothing is left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if self._service is not None:
            self._service.http.close()
            self._service = None
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(120)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, alive

    def _ray(self) -> dict[str, str]:
        """Returns the variables that a node of the running cluster has in its environment."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            if process.name() == "raylet":
                [address] = (one for one in process.cmdline() if one.startswith("--gcs-address="))
                token = str(self.home / "secrets" / "ray-token")
                found = {"RAY_ADDRESS": address.partition("=")[2], "RAY_AUTH_MODE": "token"}
                return found | {"RAY_AUTH_TOKEN_PATH": token}
        raise AssertionError("no raylet runs")
