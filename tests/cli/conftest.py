"""The command line in this process, against stand-ins on real ports."""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest
import typer.main

from serve_app.cli.__main__ import main

from .fake_grafana import FakeGrafana
from .fake_service import OPERATOR_KEY, FakeService
from .shipped_files import write_shipped

if TYPE_CHECKING:
    from .real_service import RealService

VARIABLES = (
    "SERVE_APP_URL", "SERVE_APP_INSECURE", "SERVE_APP_OPERATOR_KEY", "SERVE_APP_OPERATOR", "SERVE_APP_HOME", "PORT",
    "TLS", "GRAFANA_TOKEN", "SERVE_APP_TRACES", "SERVE_APP_METRICS_URL", "PROMETHEUS_URL",
)  # fmt: skip


new_context = ssl.create_default_context
usual_context = functools.cache(lambda: new_context(cafile=certifi.where()))
command_of = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output must hold exactly one JSON document."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]

    @property
    def error_line(self) -> str:
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        return self.err.strip()


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of the machine's own environment or folders; returns the working directory."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares what takes longer than a command and is the same for each: all commands, and the usual TLS authorities."""

    def context(**given: Any) -> ssl.SSLContext:
        return usual_context() if given == {"cafile": certifi.where()} else new_context(**given)

    monkeypatch.setattr(typer.main, "get_command", command_of)
    monkeypatch.setattr(ssl, "create_default_context", context)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is away because the machine is slow."""
    for module in ("client", "dashboards"):
        monkeypatch.setattr(f"serve_app.cli.{module}.TIMEOUT_S", 60.0)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """A running stand-in that the commands find, with the right operator key."""
    with FakeService() as service:
        monkeypatch.setenv("SERVE_APP_URL", service.url)
        monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR_KEY)
        yield service


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """The service itself, which the commands find, with the right operator key."""
    from .real_service import OPERATOR, real_service  # imported here, because it is slow and few tests need it

    with real_service(tmp_path_factory.mktemp("service")) as service:
        monkeypatch.setenv("SERVE_APP_URL", service.url)
        monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", OPERATOR)
        yield service


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as grafana:
        yield grafana


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two small dashboards and some rules, in place of the package's."""
    folder = write_shipped(tmp_path / "shipped")
    monkeypatch.setattr("serve_app.cli.grafana.shipped.SHIPPED", folder)
    return folder
