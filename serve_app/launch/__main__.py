"""Starts a whole service on this machine, waits, and stops it: `python -m serve_app.launch`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import ssl
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import yaml

from serve_app import secret_files
from serve_app.engine.engines import ENGINES
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.prepared import is_ready
from serve_app.launch import laptop_tls, one_model, preflight, vllm_environment
from serve_app.launch.driver import Driver, become_subreaper, driver_environment
from serve_app.launch.first_call import FirstCall, banner, console_path, first_call
from serve_app.launch.gpus import Found, find_gpus
from serve_app.launch.preflight import LaunchError
from serve_app.local_run import RAY
from serve_app.model import bundled
from serve_app.settings import ModelArgs, SettingsError, home_dir, parse, read_config

READY_S, SLOW_S = 180.0, 1800.0  # maximum wait for readiness; SLOW_S with vLLM or any model but the bundled one
PROGRESS_S = 30.0  # between two lines of progress
STOP_S = 13.0
KEPT_LOGS = 5  # number of runs whose logs are kept
ONLY_WITH_MODEL = ("engine", "gpus", "context", "quantization", "dry_run")


class _Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def main() -> int:
    """Runs the service. Returns 0 after Ctrl-C or SIGTERM, 1 if it could not start or died."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.launch", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--port", default=os.environ.get("PORT") or "8000", help="default: PORT, else 8000")
    parser.add_argument(
        "--home", type=Path, default=None, help="state folder; default: SERVE_APP_HOME, else .serve-app"
    )
    waits = "maximum wait for readiness; default: 180, or 1800 with vLLM or a model other than the bundled one"
    parser.add_argument("--ready-timeout", type=float, metavar="SECONDS", help=waits)
    parser.add_argument(
        "--tls", action="store_true", help="serve https with a generated certificate; default: only if TLS=1 is set"
    )
    parser.add_argument("--no-dashboard", action="store_true")
    parser.add_argument("--num-cpus", type=int, help="logical CPUs for Ray; default: the machine's, at least 4")
    parser.add_argument("--json", action="store_true", help="when ready, print one JSON document instead of text")
    model = parser.add_argument_group("one model", "serve one model on this machine instead of the models of --config")
    model.add_argument("--model", help="folder with config.json and safetensors, or a name on the hub")
    model.add_argument("--engine", choices=sorted(ENGINES), help="default: vllm on an NVIDIA GPU, else native")
    model.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs per replica; 0: the CPU; default: as many as the model needs"
    )
    model.add_argument("--context", type=int, metavar="TOKENS", help="default: the model's, at most 32768")
    model.add_argument("--quantization", metavar="METHOD", help="vLLM's method, such as fp8_per_tensor; default: none")
    model.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration; start nothing, download no weights except those of the bundled model",
    )
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_stopped)
    try:
        launch = Launch(options)
        if options.dry_run:
            print(launch.dry_run(), end="")
        else:
            launch.run_until_stopped()
    except (LaunchError, SettingsError) as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    except _Stopped:
        pass
    return 0


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise _Stopped


def print_progress(text: str) -> None:
    """Prints progress on standard error; standard output has only the result."""
    print(f"serve-app: {text}", file=sys.stderr, flush=True)


class Launch:
    """One start of the service."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home: Path = (options.home or home_dir()).expanduser().absolute()
        self.logs = self.home / "logs"
        given = vars(options)
        misplaced = [name for name in ONLY_WITH_MODEL if given.get(name) is not None and given[name] is not False]
        if misplaced and given.get("model") is None:
            raise LaunchError(f"--{misplaced[0].replace('_', '-')} needs a model: add --model (MODEL=… with make)")
        if not str(options.port).isdigit():
            raise LaunchError(f"PORT must be a number, not {options.port!r}")
        self.port = int(options.port)
        self.uses_tls: bool = options.tls or os.environ.get("TLS") == "1"
        self.base_url = f"{'https' if self.uses_tls else 'http'}://127.0.0.1:{self.port}"
        self.tls: laptop_tls.LaptopTls | None = None
        self.verify: ssl.SSLContext | bool = True
        self.ready_s: float = options.ready_timeout or READY_S

    def run_until_stopped(self) -> None:
        """Starts the service. Never returns normally: raises LaunchError, SettingsError or _Stopped."""
        if preflight.prepare_home(self.home):
            print_progress(f"closed the state folder {self.home} to other users")
        lock = preflight.lock_home(self.home)
        try:
            preflight.check_port(self.port)
            preflight.check_free_memory()
            preflight.check_free_disk(self.home)
            os.environ.update({"SERVE_APP_HOME": str(self.home), "SERVE_APP_LOCAL_STATE": "1"})
            operator_key = secret_files.load_secrets(self.home).operator_key
            self.ray_token = secret_files.secret_file(self.home, "ray-token")
            if self.uses_tls:
                self.tls = laptop_tls.prepare(self.home, datetime.now(UTC))
                self.verify = ssl.create_default_context(cafile=self.tls.authority)
            config = read_config(self.options.config)
            if vars(self.options).get("model") is not None:
                config = self._for_one_model(config)
            self.prepare_models(config)
            self._serve(config, operator_key)
        finally:
            lock.close()

    def dry_run(self) -> str:
        """Returns the configuration of `--model` as YAML. Starts and installs nothing.

        Downloads no weights, except those of the bundled model if they are missing.
        """
        config, _, _ = self._configure(read_config(self.options.config))
        return self._as_yaml(config)

    def _configure(self, base: dict[str, Any]) -> tuple[dict[str, Any], one_model.Choice, one_model.Facts]:
        """Chooses the backend for `--model` on this machine. Raises LaunchError if it does not fit."""
        options = self.options
        # With GPUS=0, nothing asks the GPU driver, so a broken driver does no harm.
        found = find_gpus(os.environ) if options.gpus != 0 else Found(())
        try:
            if options.model == "bundled":
                folder = bundled.ensure_bundled_model(self.home, print_progress)
                facts = replace(one_model.facts_of(str(folder), print_progress), model="bundled")
            else:
                facts = one_model.facts_of(options.model, print_progress)
        except ModelError as error:
            raise LaunchError(str(error)) from None
        wish = one_model.Wish(options.engine, options.gpus, options.context, options.quantization)
        machine = one_model.machine(found.gpus, found.remark)
        python = ENGINES["vllm"].python()
        assert python is not None
        choice = one_model.choose(facts, wish, machine, python)
        for line in choice.lines:
            print_progress(line)
        return one_model.configuration(base, choice), choice, facts

    def _for_one_model(self, base: dict[str, Any]) -> dict[str, Any]:
        """Returns the configuration of `--model`, after installing its engine and downloading its weights."""
        config, choice, facts = self._configure(base)
        try:
            if choice.engine == "vllm" and not os.environ.get("SERVE_APP_VLLM_PYTHON"):
                vllm_environment.install(Path(".vllm").absolute(), choice.on_gpu, print_progress)
            if facts.download:
                hub_cache = one_model.hub_folder()
                preflight.check_free_disk(hub_cache, facts.download + preflight.MIN_DISK)
            if facts.model != "bundled":
                from serve_app.engine.loading import loader

                loader.prepare(parse(ModelArgs, choice.args, "args"), print_progress)
        except (ModelError, vllm_environment.InstallError) as error:
            raise LaunchError(str(error)) from None
        return config

    def _as_yaml(self, config: dict[str, Any]) -> str:
        text = yaml.safe_dump(config, sort_keys=False)
        if vars(self.options).get("model") is None:
            return text
        return (
            f"# {self.options.model} on this machine. To change it, copy this file and start the copy:\n"
            f"# make serve ARGS='--config COPY'. docs/settings.md lists all settings.\n{text}"
        )

    def prepare_models(self, config: dict[str, Any]) -> None:
        """Prepares what is missing: fetches the bundled model, converts GGUF files, quantizes local models to int8.

        The launcher does this, so that it can show the progress.
        """
        for application in config.get("applications") or []:
            args = application.get("args") or {}
            if not isinstance(args, dict) or "model" not in args:
                continue
            try:
                self._prepare_model(parse(ModelArgs, args, f"{application.get('name')}.args"))
            except SettingsError:
                pass  # the process `deployments.run` checks the whole file and names every problem
            except ModelError as error:
                raise LaunchError(str(error)) from None

    def _prepare_model(self, settings: ModelArgs) -> None:
        if self.options.ready_timeout is None and (settings.engine != "native" or settings.model != "bundled"):
            self.ready_s = SLOW_S
        if (python := settings.python()) is not None and not Path(python).is_file():
            remedy = ENGINES[settings.engine].remedy
            raise LaunchError(f"there is no {python} to run {settings.engine} replicas: {remedy}")
        if settings.model == "bundled":
            prepare = bundled.prepare_bundled_model if settings.dtype == "int8" else bundled.ensure_bundled_model
            prepare(self.home, print_progress)
        elif not is_ready(settings):
            from serve_app.engine.loading import loader

            loader.prepare(settings, print_progress)

    def _serve(self, config: dict[str, Any], operator_key: str) -> None:
        become_subreaper()
        config.setdefault("http_options", {})["port"] = self.port
        run_config = self.home / "run" / "config.yaml"
        run_config.write_text(self._as_yaml(config))
        if vars(self.options).get("model") is not None:
            print_progress(f"the configuration is {run_config}: copy it to change it")
        # The path must be short, because the folder contains sockets: HAProxy allows paths of 97 bytes, and Serve adds
        # 68 bytes. mkdtemp closes the folder to other users. Ray's folder inside it is open to all users.
        temporary = Path(tempfile.mkdtemp(prefix="sa-", dir="/tmp" if Path("/tmp").is_dir() else None))
        self.metrics_port = preflight.free_port()
        self.haproxy_port = preflight.free_port(9101)
        self.dashboard_port = None if self.options.no_dashboard else preflight.free_port(8265)
        log = self.logs / "driver.log"
        log.write_bytes(b"")
        print_progress("starting Ray and the service")
        environment = driver_environment(self.home, temporary, self.haproxy_port, self.tls.served if self.tls else None)
        driver = Driver(self._driver_command(run_config, temporary), environment, log)
        (self.logs / "ray").unlink(missing_ok=True)
        (self.logs / "ray").symlink_to(temporary / RAY / "session_latest" / "logs")
        try:
            self._wait_until_ready(driver)
            first = first_call(self.home, self.base_url, operator_key, self.verify, console_path(config))
            self._announce(first)
            while driver.exit_code() is None:
                time.sleep(0.5)
            raise LaunchError(f"the service has died; the end of {log}:\n{driver.last_lines()}")
        except httpx.HTTPError as error:
            raise LaunchError(f"the service does not answer: {error}; see {log}") from None
        finally:
            _ignore_signals()
            print_progress("stopping")
            driver.shut_down(STOP_S, print_progress)
            self._keep_logs(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            print_progress("stopped")

    def _driver_command(self, run_config: Path, temporary: Path) -> list[str]:
        # Gateway, limiter and accounting reserve no CPU; the replicas of a model share the machine's cores.
        cpus = self.options.num_cpus or max(4, os.cpu_count() or 1)
        command = [sys.executable, "-m", "deployments.run", str(run_config), "--temp-dir", str(temporary / RAY)]
        command += ["--num-cpus", str(cpus), "--metrics-port", str(self.metrics_port)]
        if self.dashboard_port is not None:
            command += ["--dashboard-port", str(self.dashboard_port)]
        return command

    def _wait_until_ready(self, driver: Driver) -> None:
        began = reported = time.monotonic()
        told = ""
        with httpx.Client(timeout=5, trust_env=False, verify=self.verify) as client:
            while (now := time.monotonic()) < began + self.ready_s:
                if now >= reported + PROGRESS_S:
                    print_progress(f"still waiting for the models after {now - began:.0f} s; logs are in {self.logs}")
                    reported = now
                if (code := driver.exit_code()) is not None:
                    if code == 2:
                        raise LaunchError(f"the configuration is wrong:\n{driver.last_lines(20)}")
                    raise LaunchError(f"Ray could not start; the end of {driver.log}:\n{driver.last_lines()}")
                try:
                    if client.get(f"{self.base_url}/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                if (failure := self._failed_start(client)) not in ("", told):
                    print_progress(failure)
                    told = failure
                time.sleep(0.3)
        raise LaunchError(f"the service was not ready within {self.ready_s:.0f} s; see {self.logs}")

    def _failed_start(self, client: httpx.Client) -> str:
        """Returns a message about a replica that failed to start, while Serve starts it again; empty if none failed.

        Raises LaunchError as soon as Serve gives up on an application.
        """
        if self.dashboard_port is None:
            return ""
        try:
            response = client.get(
                f"http://127.0.0.1:{self.dashboard_port}/api/serve/applications/",
                headers={"authorization": f"Bearer {self.ray_token}"},
            )
            applications = response.json().get("applications", {}) if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return ""
        failed = ""
        for name, application in applications.items():
            if application.get("status") == "DEPLOY_FAILED":
                raise LaunchError(f"the application {name} can't start: {_last_line(application)}")
            for deployment in application.get("deployments", {}).values():
                if "failed to start" in deployment.get("message", ""):
                    failed = f"a replica of {name} could not start, and is started again: {_last_line(deployment)}"
        return failed

    def _announce(self, first: FirstCall) -> None:
        facts = {
            "base_url": self.base_url,
            "api_key": first.api_key,
            "console_url": first.console_url,
            "sign_in_url": first.sign_in_url,
            "dashboard_url": None if self.dashboard_port is None else f"http://127.0.0.1:{self.dashboard_port}",
            "dashboard_token_file": str(self.home / "secrets" / "ray-token"),
            "metrics_url": f"http://127.0.0.1:{self.metrics_port}/metrics",
            "haproxy_metrics_url": f"http://127.0.0.1:{self.haproxy_port}/metrics",
            "ca_file": None if self.tls is None else str(self.tls.authority),
            "home": str(self.home),
        }
        print(json.dumps(facts) if self.options.json else banner(facts), flush=True)

    def _keep_logs(self, temporary: Path) -> None:
        """Moves this run's logs of Ray and Serve into the state folder; deletes the logs of the oldest runs."""
        (self.logs / "ray").unlink(missing_ok=True)
        logs = (temporary / RAY / "session_latest" / "logs").resolve()
        if logs.is_dir():
            shutil.move(str(logs), self.logs / time.strftime("ray-%Y%m%d-%H%M%S"))
        for old in sorted(self.logs.glob("ray-*"))[:-KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)


def _last_line(described: dict[str, Any]) -> str:
    """Returns the last line of Serve's message about an application or deployment. In a traceback, it is the error."""
    lines = [line.strip() for line in described.get("message", "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


if __name__ == "__main__":
    sys.exit(main())
