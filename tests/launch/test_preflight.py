"""A start that fails prints one line and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from serve_app import secret_files
from serve_app.launch import __main__ as launcher
from serve_app.launch import preflight
from serve_app.launch.preflight import GIB, LaunchError
from tests.cli.local_http import Answer, LocalServer, Request

ROOT = Path(__file__).parents[2]


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [preflight.free_port() for _ in range(50)]
    assert len({*ports}) == 50
    for port in ports:
        assert preflight.is_free(port)
        assert not first <= port <= last


def test_without_a_free_port_there_is_one_line(busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_drawn", itertools.repeat(busy_port))
    with pytest.raises(LaunchError, match="no port from 20000 to 32767 is free"):
        preflight.free_port()


@dataclass
class Start:
    """`python -m serve_app.launch` in this process, and what it said."""

    _patch: pytest.MonkeyPatch
    _said: pytest.CaptureFixture[str]

    def fails(self, home: Path, *arguments: str, **environment: str) -> str:
        """The lines of a start that fails, each with the name of the program."""
        for name, value in {"SERVE_APP_HOME": str(home), **environment}.items():
            self._patch.setenv(name, value)
        self._patch.setattr(sys, "argv", ["serve-app", *arguments])
        assert launcher.main() == 1
        told = self._said.readouterr()
        assert told.out == ""
        assert all(line.startswith("serve-app: ") for line in told.err.splitlines())
        return told.err

    def fails_at_once(self, home: Path, *arguments: str, **environment: str) -> str:
        """The one line of a start that fails before it does anything."""
        (line,) = self.fails(home, *arguments, **environment).splitlines()
        return line


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Start]:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(preflight, "check_free_memory", lambda: None)
    with mock.patch.dict(os.environ):
        yield Start(monkeypatch, capsys)


def test_a_busy_port_is_named_with_what_to_do(start: Start, tmp_path: Path, busy_port: int) -> None:
    line = start.fails_at_once(tmp_path, PORT=str(busy_port))
    assert str(busy_port) in line
    assert "PORT=" in line


@pytest.mark.parametrize("port", ["eighty", "0", "70000", "-1"])
def test_an_invalid_port_is_refused(start: Start, tmp_path: Path, port: str) -> None:
    assert "PORT must be" in start.fails_at_once(tmp_path, f"--port={port}")


def test_a_state_folder_that_can_not_be_made_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "SERVE_APP_HOME" in start.fails_at_once(tmp_path / "file" / "home")


def test_a_missing_config_and_one_that_is_not_yaml_are_named(start: Start, tmp_path: Path) -> None:
    port = str(preflight.free_port())
    assert "nowhere.yaml" in start.fails_at_once(tmp_path, "--config", "nowhere.yaml", "--port", port)
    (tmp_path / "broken.yaml").write_text("a: [")
    assert "not YAML" in start.fails_at_once(tmp_path, "--config", str(tmp_path / "broken.yaml"), "--port", port)


def test_a_bundled_model_that_can_not_be_downloaded_is_one_line(start: Start, tmp_path: Path) -> None:
    options = ("--config", str(ROOT / "config.yaml"), "--port", str(preflight.free_port()))
    told = start.fails(tmp_path, *options, SERVE_APP_BUNDLED_GGUF=str(tmp_path / "missing.gguf"))
    assert "missing.gguf" in told


def test_what_the_driver_says_of_a_wrong_config_is_passed_on(tmp_path: Path) -> None:
    options = Namespace(home=tmp_path, port="8000", config=tmp_path, ready_timeout=None, tls=False, no_dashboard=True)
    driver = SimpleNamespace(exit_code=lambda: 2, last_lines=lambda count: "applications.0.argz: unknown key")
    with pytest.raises(LaunchError, match=r"the configuration is wrong:\napplications\.0\.argz: unknown key"):
        launcher.Launch(options)._wait_until_ready(driver)  # type: ignore[arg-type]


class Starting(LocalServer):
    """A gateway that is not ready, and Serve's dashboard while a replica fails; Serve gives up at the fourth look."""

    def handle(self, request: Request) -> Answer:
        if request.path == "/ready":
            return Answer(503, {})
        looks = sum(one.path == request.path for one in self.requests)
        error = "Traceback (most recent call last):\n  ...\nRuntimeError: shape mismatch\n"
        replica = {"message": f"A replica failed to start with exception. Retrying {4 - looks} more time(s).\n{error}"}
        status = "DEPLOYING" if looks < 4 else "DEPLOY_FAILED"
        application = {"status": status, "message": error, "deployments": {"Model": replica if looks > 1 else {}}}
        return Answer(200, {"applications": {"smollm2": application}})


def test_why_a_replica_can_not_start_is_told_once_while_serve_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Starting() as server:
        port = server.url.rpartition(":")[2]
        options = Namespace(home=tmp_path, port=port, config=tmp_path, ready_timeout=None, tls=False)
        launch = launcher.Launch(options)
        launch.dashboard_port, launch.ray_token = int(port), "token"
        with pytest.raises(LaunchError, match="the application smollm2 can't start: RuntimeError: shape mismatch"):
            launch._wait_until_ready(SimpleNamespace(exit_code=lambda: None))  # type: ignore[arg-type]
    told = "serve-app: a replica of smollm2 could not start, and is started again: RuntimeError: shape mismatch\n"
    assert capsys.readouterr().err == told


@pytest.mark.slow
def test_a_wrong_config_names_every_path_and_nothing_stays_running(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications:\n- name: gateway\n  import_path: deployments.apps:gateway\n  argz: {}\n")
    command = [sys.executable, "-m", "serve_app.launch", "--config", str(config)]
    result = subprocess.run(
        [*command, "--port", str(preflight.free_port())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "SERVE_APP_HOME": str(tmp_path / "home")},
    )
    assert result.returncode == 1
    assert "applications.0.argz: unknown key" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(Path("/tmp").glob(f"sa-*/{tmp_path.name}"))


def test_a_new_state_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert not preflight.prepare_home(home)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home, *home.iterdir())} == {0o700}


@pytest.mark.parametrize("made", ["home/secrets", "home/models/smollm2-135m-instruct", "home", ".serve-app/test"])
def test_a_state_folder_of_an_earlier_start_or_setup_is_closed(tmp_path: Path, made: str) -> None:
    (tmp_path / made).mkdir(parents=True)
    home = tmp_path / made.split("/")[0]
    home.chmod(0o755)
    assert preflight.prepare_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_folder_of_other_programs_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()
    (tmp_path / "site").chmod(0o755)
    with pytest.raises(LaunchError, match="set SERVE_APP_HOME to a new folder"):
        preflight.prepare_home(tmp_path / "site")
    assert stat.S_IMODE((tmp_path / "site").stat().st_mode) == 0o755
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["index.html"]


def test_two_services_do_not_share_a_state_folder(tmp_path: Path) -> None:
    preflight.prepare_home(tmp_path)
    with preflight.lock_home(tmp_path), pytest.raises(LaunchError, match=f"process {os.getpid()}"):
        preflight.lock_home(tmp_path)
    preflight.lock_home(tmp_path).close()


def test_too_little_memory_says_how_much_is_there_and_needed() -> None:
    with pytest.raises(LaunchError, match=r"1\.0 GiB are available, 2\.5 GiB are needed"):
        preflight.check_free_memory(available=GIB)
    preflight.check_free_memory(available=4 * GIB)


def test_a_full_disk_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="free disk"):
        preflight.check_free_disk(tmp_path, needed=2**60)


def test_an_old_python_is_reported_first(tmp_path: Path) -> None:
    """The Makefile's own check, run by a stand-in for an old interpreter."""
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    result = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "serve", f"PYTHON={old}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed, Python 3.9.1 is too old" in result.stderr
    assert "Traceback" not in result.stderr


def test_secrets_are_made_once_for_concurrent_starts_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[str] = []

    def make() -> None:
        barrier.wait()
        found.append(secret_files.secret_file(tmp_path, "operator-key"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found[0]) >= 40
    files = list((tmp_path / "secrets").iterdir())
    assert [file.name for file in files] == ["operator-key"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_secrets_of_the_environment_win_and_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", "from the environment")
    monkeypatch.setenv("SERVE_APP_SECRET_KEY", "a secret from the environment")
    loaded = secret_files.load_secrets(tmp_path)
    assert loaded.operator_key == "from the environment"
    assert "environment" not in repr(loaded)
    assert not (tmp_path / "secrets").exists()
