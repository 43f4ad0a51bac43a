"""Starts a whole service on this machine, waits, and stops it: `python -m serve_app.launch`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import yaml

from serve_app import bundled, secrets
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.sources import is_ready
from serve_app.launch import preflight
from serve_app.launch.banner import banner
from serve_app.launch.bootstrap import first_key
from serve_app.launch.preflight import LaunchError
from serve_app.launch.processes import Family, adopt_orphans
from serve_app.settings import ModelArgs, SettingsError, home_dir, parse

READY_S = 180.0
STOP_S = 13.0
KEPT_LOGS = 5
HARD_STOP_AFTER_S = 900  # HAProxy's old workers outlive the longest stream


class _Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def main() -> int:
    """Exit code 0 after Ctrl-C or SIGTERM, 1 when the service could not start or died."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        Launch(options).run()
    except LaunchError as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    except _Stopped:
        pass
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve_app.launch", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--port", default=os.environ.get("PORT") or "8000", help="default: PORT, else 8000")
    parser.add_argument(
        "--home", type=Path, default=None, help="state folder; default: SERVE_APP_HOME, else .serve-app"
    )
    parser.add_argument("--no-dashboard", action="store_true")
    parser.add_argument("--num-cpus", type=int, help="logical CPUs for Ray; default: the machine's, at least 4")
    parser.add_argument("--json", action="store_true", help="when ready, print one JSON document instead of text")
    return parser.parse_args()


def _stop(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped


def say(text: str) -> None:
    """Progress for the person at the terminal; standard output is for the result alone."""
    print(f"serve-app: {text}", file=sys.stderr, flush=True)


class Launch:
    """One start of the service."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home: Path = (options.home or home_dir()).expanduser().absolute()
        if not str(options.port).isdigit():
            raise LaunchError(f"PORT must be a number, not {options.port!r}")
        self.port = int(options.port)
        self.base_url = f"http://127.0.0.1:{self.port}"

    def run(self) -> None:
        """Returns only by an exception: LaunchError or _Stopped."""
        preflight.check_python()
        preflight.prepare_home(self.home)
        lock = preflight.lock_home(self.home)
        try:
            preflight.check_port(self.port)
            preflight.check_memory()
            preflight.check_disk(self.home)
            os.environ["SERVE_APP_HOME"] = str(self.home)
            keys = secrets.load(self.home)
            self.ray_token = secrets.secret_file(self.home, "ray-token")
            self._prepare_models()
            self._serve(keys)
        finally:
            lock.close()

    def _prepare_models(self) -> None:
        """What is made once from the models' files, now, where progress can be seen, rather than in a replica."""
        for application in self._config().get("applications") or []:
            args = application.get("args") or {}
            if not isinstance(args, dict) or "model" not in args:
                continue
            try:
                self._prepare_model(parse(ModelArgs, args, f"{application.get('name')}.args"))
            except SettingsError:
                pass  # the driver checks the whole file and names every problem
            except ModelError as error:
                raise LaunchError(str(error)) from None

    def _prepare_model(self, settings: ModelArgs) -> None:
        if settings.model == "bundled":
            (bundled.prepare if settings.dtype == "int8" else bundled.ensure_bundled_model)(self.home, say)
        elif not is_ready(settings):
            from serve_app.engine.loading import loader  # brings torch: only where there is something to do

            loader.prepare(settings, say)

    def _config(self) -> dict[str, Any]:
        try:
            config = yaml.safe_load(self.options.config.read_text())
        except OSError as error:
            raise LaunchError(f"{self.options.config} can't be read: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise LaunchError(f"{self.options.config} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(config, dict):
            raise LaunchError(f"{self.options.config} must be a mapping with `applications`")
        return config

    def _serve(self, keys: secrets.Secrets) -> None:
        adopt_orphans()
        config = self._config()
        config.setdefault("http_options", {})["port"] = self.port
        run_config = self.home / "run" / "config.yaml"
        run_config.write_text(yaml.safe_dump(config, sort_keys=False))
        # Short, because sockets live in it: HAProxy's path may have 97 bytes, 68 of them are Serve's choice.
        temporary = Path(tempfile.mkdtemp(prefix="sa-", dir="/tmp" if Path("/tmp").is_dir() else None))
        self.metrics_port = preflight.free_port()
        self.haproxy_port = preflight.free_port(9101)
        self.dashboard_port = None if self.options.no_dashboard else preflight.free_port(8265)
        say("starting Ray and the service")
        family = Family(self._command(run_config, temporary), self._environment(temporary), self._log())
        try:
            self._wait_until_ready(family)
            key = first_key(self.home, self.base_url, keys.operator_key)
            self._announce(key, temporary)
            while family.exit_code() is None:
                time.sleep(0.5)
            raise LaunchError(f"the service has died; the end of {family.log}:\n{family.last_lines()}")
        except httpx.HTTPError as error:
            raise LaunchError(f"the service does not answer: {error}; see {family.log}") from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            say("stopping")
            family.stop(STOP_S, say)
            self._keep_logs(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            say("stopped")

    def _command(self, run_config: Path, temporary: Path) -> list[str]:
        # Gateway, limiter and accounting ask for no CPU; replicas of a laptop's model share its cores.
        cpus = self.options.num_cpus or max(4, os.cpu_count() or 1)
        command = [sys.executable, "-m", "deployments.run", str(run_config), "--temp-dir", str(temporary)]
        command += ["--num-cpus", str(cpus), "--metrics-port", str(self.metrics_port)]
        if self.dashboard_port is not None:
            command += ["--dashboard-port", str(self.dashboard_port)]
        return command

    def _environment(self, temporary: Path) -> dict[str, str]:
        """HAProxy's flags must be set before Ray starts; its files and ports are this run's own."""
        haproxy = temporary / "ha"
        haproxy.mkdir()
        defaults = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_AFTER_S),
            # The only load balancer is this machine's HAProxy, which hears of a change at once.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Models run at the user's own priority; what else there is yields to them (deployments/priority.py).
            "RAY_worker_niceness": "0",
            # Whoever can reach the dashboard can run code: no page in a browser may, without the token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.home / "secrets" / "ray-token"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        own = {
            "SERVE_APP_HOME": str(self.home),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.haproxy_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(preflight.free_port(8404)),
            # While no gateway runs, HAProxy asks Serve's own proxy: at the usual ports that may be another service's,
            # which would answer with its own accounts.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(preflight.free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(preflight.free_port()),
        }
        # Code of the working directory, as `serve run` sees it.
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        return {**defaults, **os.environ, **own, "PYTHONPATH": path}

    def _log(self) -> Path:
        log = self.home / "logs" / "driver.log"
        log.write_bytes(b"")
        return log

    def _wait_until_ready(self, family: Family) -> None:
        deadline = time.monotonic() + READY_S
        with httpx.Client(timeout=5, trust_env=False) as client:
            while time.monotonic() < deadline:
                if (code := family.exit_code()) is not None:
                    if code == 2:
                        raise LaunchError(f"the configuration is wrong:\n{family.last_lines(20)}")
                    raise LaunchError(f"Ray could not start; the end of {family.log}:\n{family.last_lines()}")
                try:
                    if client.get(f"{self.base_url}/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                self._fail_early(client)
                time.sleep(0.3)
        raise LaunchError(f"the service was not ready within {READY_S:.0f} s; see {self.home / 'logs'}")

    def _fail_early(self, client: httpx.Client) -> None:
        """Tells why an application can't be deployed, as soon as Serve knows."""
        if self.dashboard_port is None:
            return
        try:
            answer = client.get(
                f"http://127.0.0.1:{self.dashboard_port}/api/serve/applications/",
                headers={"authorization": f"Bearer {self.ray_token}"},
            )
            applications = answer.json().get("applications", {}) if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return
        for name, application in applications.items():
            if application.get("status") == "DEPLOY_FAILED":
                lines = [line.strip() for line in application.get("message", "").splitlines() if line.strip()]
                raise LaunchError(f"the application {name} can't start: {lines[-1] if lines else 'no reason given'}")

    def _announce(self, key: str, temporary: Path) -> None:
        dashboard = None if self.dashboard_port is None else f"http://127.0.0.1:{self.dashboard_port}"
        token = str(self.home / "secrets" / "ray-token")
        metrics = f"http://127.0.0.1:{self.metrics_port}/metrics"
        link = self.home / "logs" / "ray"
        link.unlink(missing_ok=True)
        link.symlink_to(temporary / "session_latest" / "logs")
        if self.options.json:
            document = {
                "base_url": self.base_url,
                "api_key": key,
                "dashboard_url": dashboard,
                "dashboard_token_file": token,
                "metrics_url": metrics,
                "haproxy_metrics_url": f"http://127.0.0.1:{self.haproxy_port}/metrics",
                "home": str(self.home),
            }
            print(json.dumps(document), flush=True)
        else:
            print(
                banner(self.base_url, key, dashboard and f"{dashboard}   (token: {token})", str(self.home), metrics),
                flush=True,
            )

    def _keep_logs(self, temporary: Path) -> None:
        """Moves Ray's and Serve's logs of this run into the state folder; the oldest runs make room."""
        (self.home / "logs" / "ray").unlink(missing_ok=True)
        logs = (temporary / "session_latest" / "logs").resolve()
        if logs.is_dir():
            target = self.home / "logs" / time.strftime("ray-%Y%m%d-%H%M%S")
            shutil.move(str(logs), target)
        for old in sorted((self.home / "logs").glob("ray-*"))[:-KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
