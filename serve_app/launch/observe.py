"""Runs a Prometheus for the service on this machine: `make observe`.

It reads the service's state folder and needs no settings. While it runs, it follows the service across restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from serve_app.launch.driver import Driver
from serve_app.launch.preflight import LaunchError, is_free
from serve_app.launch.prometheus_config import check_config, find_service, write_config
from serve_app.settings import home_dir

READY_S = 60.0
STOP_S = 15.0
NO_PROMETHEUS = "there is no prometheus: `apt-get install prometheus`, or put one from prometheus.io/download on PATH"


def observe(options: argparse.Namespace) -> None:
    """Runs Prometheus. Never returns normally: raises LaunchError or KeyboardInterrupt."""
    home: Path = (options.home or home_dir()).expanduser().absolute()
    if (prometheus := shutil.which("prometheus")) is None:
        raise LaunchError(NO_PROMETHEUS)
    if (service := find_service(home)) is None:
        raise LaunchError(f"no running service uses the state folder {home}: start one with `make serve`")
    if not service.ray_targets.exists():
        raise LaunchError(
            f"Ray's dashboard has not written {service.ray_targets}: was the service started with --no-dashboard?"
        )
    if not is_free(options.port):
        raise LaunchError(
            f"port {options.port} is taken: choose another with --port; Debian's package starts a Prometheus at 9090: "
            "to stop it, run `systemctl disable --now prometheus`"
        )
    rules = (files("serve_app.boards") / "rules.yaml").read_text(encoding="utf-8")
    labels = {"cluster": options.cluster, "namespace": options.namespace}
    url = f"http://127.0.0.1:{options.port}"
    with _folder(home / "observe") as folder, tempfile.TemporaryDirectory() as scratch:
        config = write_config(folder, service, rules, **labels)
        check_config(config)
        if options.grafana:
            _push_boards(options, url)
        command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command.append(f"--web.listen-address=127.0.0.1:{options.port}")
        running = Driver(command, dict(os.environ), Path(scratch) / "log")
        try:
            _wait_until_ready(running, url)
            facts = {"prometheus_url": url, "config": str(config), "data": str(folder / "data"), **labels}
            facts["targets"] = service.targets()
            print(json.dumps(facts) if options.json else _banner(facts), flush=True)
            while running.exit_code() is None:
                time.sleep(1)
                if (now := find_service(home)) is not None and now != service:
                    service = now
                    write_config(folder, service, rules, **labels)
            raise LaunchError(f"Prometheus has ended:\n{running.last_lines()}")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            running.shut_down(STOP_S, lambda text: print(f"serve-app: {text}", file=sys.stderr))


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """Locks the folder for this process. At the end of the `with` block, removes everything in it except `data`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(f"another `make observe` uses {folder}") from None
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                if path.name != "data":
                    path.unlink()
    finally:
        os.close(handle)


def _wait_until_ready(running: Driver, url: str) -> None:
    deadline = time.monotonic() + READY_S
    with httpx.Client(timeout=2, trust_env=False) as client:
        while time.monotonic() < deadline:
            if running.exit_code() is not None:
                raise LaunchError(f"Prometheus could not start:\n{running.last_lines()}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/-/ready").status_code == 200:
                    return
            time.sleep(0.1)
    raise LaunchError(f"Prometheus was not ready within {READY_S:.0f} s:\n{running.last_lines()}")


def _push_boards(options: argparse.Namespace, url: str) -> None:
    command = [sys.executable, "-m", "serve_app.cli", "dashboards", "push"]
    command += ["--grafana", options.grafana, "--prometheus", url]
    command += ["--token-file", str(options.token_file)] if options.token_file else []
    # The command prints for people, so its output goes to standard error. Standard output carries only the result.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise LaunchError("the dashboards were not pushed: see the lines above")


def _banner(facts: dict[str, Any]) -> str:
    url = facts["prometheus_url"]
    targets = "\n".join(f"                {target['address']}   ({target['job']})" for target in facts["targets"])
    return f"""
  Prometheus is ready.

  address       {url}
  targets       {url}/targets
{targets}
  alerts        {url}/alerts
  labels        cluster="{facts["cluster"]}", namespace="{facts["namespace"]}"
  data          {facts["data"]}   (kept)

  Ctrl-C stops it.
"""


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 1 when Prometheus could not start or died."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.launch.observe", description=__doc__)
    parser.add_argument("--port", type=int, default=9090, help="port of Prometheus on 127.0.0.1; default: 9090")
    parser.add_argument(
        "--home", type=Path, help="the service's state folder; default: SERVE_APP_HOME, else .serve-app"
    )
    parser.add_argument("--cluster", default="local", help="`cluster` label of every series; default: local")
    parser.add_argument("--namespace", default="default", help="`namespace` label of every series; default: default")
    parser.add_argument("--grafana", metavar="URL", help="push the dashboards to this Grafana first")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with Grafana's token; default: GRAFANA_TOKEN"
    )
    parser.add_argument("--json", action="store_true", help="when ready, print one line of JSON instead of text")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        observe(options)
    except LaunchError as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
