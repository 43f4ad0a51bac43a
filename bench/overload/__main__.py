"""Starts the service with the bundled model, learns what it carries, then sends three times as much: `make
bench-overload`, or `python -m bench.overload`. It wants the machine for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from bench.chaos.stand import ROOT, Shape, Stand
from bench.engine.machine import describe
from bench.engine.processes import interrupted_by_sigterm
from bench.overload.figures import goodput, markdown, promises, summary
from bench.overload.traffic import REPLY_TOKENS, Caller, Traffic

WEIGHTS: Final = {"w100": 100, "w200": 200, "w300": 300, "w400": 400}


@dataclass(frozen=True, slots=True)
class AsConfigured(Shape):
    """One replica of the bundled model, and the pressure settings of config.yaml."""

    def config(self) -> dict[str, Any]:
        """The Serve config."""
        config = Shape.config(self)
        of_file = yaml.safe_load((ROOT / "config.yaml").read_text())["applications"][0]["deployments"]
        [limits] = [one["user_config"] for one in of_file if one["name"] == "Limiter"]
        [limiter] = [one for one in config["applications"][0]["deployments"] if one["name"] == "Limiter"]
        limiter["user_config"] = limits
        return config


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when every promise holds, else 1."""
    options = _options(arguments)
    with interrupted_by_sigterm(), Stand(AsConfigured(), _say) as stand:
        results = asyncio.run(_run(stand, options))
    results |= {"seed": options.seed, "machine": describe()}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    return 0 if all(kept for _, _, kept in promises(results["overload"])) else 1


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


async def _run(stand: Stand, options: argparse.Namespace) -> dict[str, Any]:
    callers = {name: _account(stand, name, weight) for name, weight in {"alone": 100, **WEIGHTS}.items()}
    traffic = Traffic(urlsplit(stand.base_url).port or 80, options.seed)
    await traffic.full(callers["alone"], 4, options.warm_up)
    traffic.take()
    began = time.perf_counter()
    await traffic.full(callers["alone"], options.clients, options.seconds_alone)
    capacity = goodput(traffic.take(), began + 2, began + options.seconds_alone)
    _say(f"{capacity:.0f} tokens/s with {options.clients} clients")
    began = time.perf_counter()
    per_s = options.times * capacity / REPLY_TOKENS / len(WEIGHTS)
    seconds = options.settle + options.seconds
    await traffic.arrive([callers[name] for name in WEIGHTS], per_s, seconds)
    found = summary(traffic.take(), WEIGHTS, capacity, began + options.settle, began + seconds)
    return {"times": options.times, "clients": options.clients, "capacity": capacity, "overload": found}


def _account(stand: Stand, name: str, weight: int) -> Caller:
    body = {"name": name, "credit": "1000", "weight": weight, "rpm": 10**6, "concurrency": 512}
    account = stand.admin("POST", "/admin/accounts", body)
    return Caller(name, stand.admin("POST", f"/admin/accounts/{account['id']}/keys", {"name": "bench"})["key"])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--times", type=float, default=3.0, help="what it can carry; default: 3")
    parser.add_argument("--clients", type=int, default=24, help="that just fill it; default: 24")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds; default: 8")
    parser.add_argument("--seconds-alone", type=float, default=25.0, help="that its capacity is measured; default: 25")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the counted ones; default: 20")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the counted overload; default: 60")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything measured")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
