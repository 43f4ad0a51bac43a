"""Sends ordinary traffic to the service with config.yaml. A Prometheus with the shipped rules watches it.

No alert may fire, and none may be pending at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError

import httpx

from bench.harness.command import PEERS, ROOT, completed, say
from bench.harness.processes import Tree
from bench.harness.servers import Bundled, ServerError
from bench.healthy.traffic import Keys, Traffic
from dashboards import pictures
from dashboards.query import Prometheus
from serve_app.launch.preflight import free_port

BOARDS: Final = ("users", "engine", "money")
STEP_S: Final = 5.0  # the scrape interval of `make observe`


class Healthy(Bundled):
    """The service with Ray's dashboard, which lists the scrape targets."""

    name = "healthy"

    def command(self) -> list[str]:
        return [one for one in super().command() if one != "--no-dashboard"]


@contextmanager
def observed(server: Healthy) -> Iterator[str]:
    """Starts a Prometheus as `make observe` does. Yields its address. Raises ServerError."""
    command = [sys.executable, "-m", "serve_app.launch.observe", "--json"]
    command += ["--home", str(server.home), "--port", str(free_port())]
    tree = Tree(command, server.environment(), server.folder / "logs" / "observe.log", ROOT, piped=True)
    try:
        assert tree.root.stdout is not None
        line = tree.root.stdout.readline()
        if not line:
            raise ServerError(f"Prometheus did not start: {tree.last_lines()}")
        yield json.loads(line)["prometheus_url"]
    finally:
        tree.stop(server.patience_s)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if no alert fired, none is pending at the end and no request failed, else 1."""
    options = _options(arguments)
    found = completed(lambda: _run(options), (ServerError, URLError, httpx.HTTPError))
    print(json.dumps(found, indent=1))
    failed = [status for status in found["statuses"] if status == "0" or status.startswith("5")]
    return 1 if found["fired"] or found["pending at the end"] or failed else 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    server = Healthy(PEERS)
    try:
        server.start()
        with observed(server) as url:
            keys = Keys(
                server.new_account("roomy", "1000", rpm=10_000)[1], server.new_account("narrow", "10", rpm=6)[1]
            )
            traffic = Traffic(server.base_url, keys, options.seed)
            began = time.time()
            asyncio.run(traffic.send(options.clients, 60 * options.minutes))
            ended = time.time()
            prometheus = Prometheus(url)
            if options.pictures:
                shown = pictures.Time(began, ended)
                for name in BOARDS:
                    path = options.pictures / f"{name}.png"
                    pictures.draw(prometheus, f"serve-app-{name}", path, shown, {}, rows=options.rows)
                    say(f"wrote {path}")
            return {
                "minutes": options.minutes,
                "clients": options.clients,
                "statuses": {str(status): count for status, count in sorted(traffic.statuses.items())},
                "fired": _alerts(prometheus, "firing", began, ended),
                "pending for a while": _alerts(prometheus, "pending", began, ended),
                "pending at the end": sorted({one["alertname"] for one in prometheus.alerts("pending")}),
                "rules that failed": [
                    rule["name"]
                    for group in prometheus.get("rules")["groups"]
                    for rule in group["rules"]
                    if rule["health"] == "err"
                ],
            }
    finally:
        server.stop()


def _alerts(prometheus: Prometheus, state: str, began: float, ended: float) -> list[str]:
    """Returns the alerts that were in this state at any time."""
    found = prometheus.ask_range(f'ALERTS{{alertstate="{state}"}}', began, ended, STEP_S)
    return sorted({one.labels["alertname"] for one in found})


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.healthy", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--clients", type=int, default=4, help="default: 4")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the boards; needs matplotlib")
    parser.add_argument("--rows", type=int, default=3, help="rows of each picture; default: 3")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
