"""The Ray driver of a one-machine service: `python -m deployments.run CONFIG`, started by serve_app.launch.

It validates the file, starts a local Ray and runs `serve run`. SIGINT and SIGTERM shut both down in order.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.serve.scripts import run as serve_run

from deployments import strict_config
from serve_app import secret_files
from serve_app.settings import GatewayArgs, SettingsError, parse


def main() -> int:
    """Runs the service. Returns exit code 2 for an invalid config, 0 after a signal."""
    parser = argparse.ArgumentParser(prog="python -m deployments.run", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--temp-dir", help="Ray's folder for this run; use a short path, because it contains sockets")
    parser.add_argument("--num-cpus", type=int, help="logical CPUs (default: all CPUs of the machine)")
    parser.add_argument("--dashboard-port", type=int, help="port of the dashboard (default: no dashboard)")
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--check", action="store_true", help="only validate the config")
    options = parser.parse_args()
    try:
        config = strict_config.load_config(options.config)
        if not options.check:
            check_state(config)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        return 0
    ray.init(
        num_cpus=options.num_cpus,
        include_dashboard=options.dashboard_port is not None,
        dashboard_port=options.dashboard_port,
        _temp_dir=options.temp_dir,
        _metrics_export_port=options.metrics_port,
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    # ray.init sets its own handler for SIGTERM, which would leave Serve and HAProxy running.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        serve_run.main(args=[str(options.config)], standalone_mode=False)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ray.shutdown()
    return 0


def check_state(config: dict[str, Any]) -> None:
    """Raises SettingsError for secrets or a database address that the gateway's processes would reject."""
    for application in config["applications"]:
        if application["import_path"] == strict_config.GATEWAY:
            args = parse(GatewayArgs, application.get("args") or {}, "args")
            args.ledger_url()
            secret_files.load_secrets(args.state_dir())


def _interrupt(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
