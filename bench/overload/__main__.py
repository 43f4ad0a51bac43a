"""Measures the capacity of the service with the bundled model, then sends three times as much: `make bench-overload`.

Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError

from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import Launched, ServerError, deployment, shipped_config
from bench.overload.figures import goodput, markdown, promises, summary
from bench.overload.traffic import REPLY_TOKENS, Caller, Traffic
from serve_app.model.bundled import ensure_bundled_model

WEIGHTS: Final = {"w100": 100, "w200": 200, "w300": 300, "w400": 400}


class Overloaded(Launched):
    """config.yaml with its pressure settings, and one replica of the bundled model."""

    name = "overload"
    title = "serve-app"

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        model = deployment(config, "Model")
        del model["autoscaling_config"]
        model |= {"num_replicas": 1, "max_ongoing_requests": 512}
        return config

    def command(self) -> list[str]:
        folder = ensure_bundled_model(self.folder / "home", say).parent  # converted once for all runs
        shutil.rmtree(self.home, ignore_errors=True)  # a new ledger for every run
        self.home.mkdir(parents=True)
        (self.home / "models").symlink_to(folder.absolute())
        return super().command()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "TOKENIZERS_PARALLELISM": "false"}

    @property
    def facts(self) -> dict[str, Any]:
        return {}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every promise holds, else 1."""
    options = _options(arguments)
    results = completed(lambda: _measure(options), (ServerError, URLError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    return 0 if all(kept for _, _, kept in promises(results["overload"])) else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    server = Overloaded(PEERS)
    try:
        server.start()
        results = asyncio.run(_run(server, options))
    finally:
        server.stop()
    return {**results, "seed": options.seed, "machine": describe()}


async def _run(server: Overloaded, options: argparse.Namespace) -> dict[str, Any]:
    callers = {name: _account(server, name, weight) for name, weight in {"alone": 100, **WEIGHTS}.items()}
    traffic = Traffic(server.port, options.seed)
    await traffic.full(callers["alone"], 4, options.warm_up)
    traffic.take()
    began = time.perf_counter()
    await traffic.full(callers["alone"], options.clients, options.seconds_alone)
    capacity = goodput(traffic.take(), began + 2, began + options.seconds_alone)
    say(f"{capacity:.0f} tokens/s with {options.clients} clients")
    began = time.perf_counter()
    per_s = options.times * capacity / REPLY_TOKENS / len(WEIGHTS)
    seconds = options.settle + options.seconds
    await traffic.arrive([callers[name] for name in WEIGHTS], per_s, seconds)
    found = summary(traffic.take(), WEIGHTS, capacity, began + options.settle, began + seconds)
    return {"times": options.times, "clients": options.clients, "capacity": capacity, "overload": found}


def _account(server: Overloaded, name: str, weight: int) -> Caller:
    _, key = server.new_account(name, "1000", weight=weight, rpm=10**6, concurrency=512)
    return Caller(name, key)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--times", type=float, default=3.0, help="load as a multiple of the capacity; default: 3")
    parser.add_argument("--clients", type=int, default=24, help="clients that just use the whole capacity; default: 24")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds of warm-up; default: 8")
    parser.add_argument("--seconds-alone", type=float, default=25.0, help="to measure the capacity; default: 25")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the measured ones; default: 20")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measured overload; default: 60")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
