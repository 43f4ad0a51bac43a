"""Measures the delivery of streamed tokens at a fixed rate: `make bench-stream`, or `python -m bench.stream`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import parts
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.processes import Tree
from bench.harness.servers import Launched, ServerError, deployment, shipped_config
from bench.harness.stub_request import BACKEND, MODEL
from bench.stream import report
from bench.stream.client import load
from bench.stream.paced import RATE
from serve_app import secret_files

#: Streams, tokens per second of each, and share of replies during which the client hangs up.
LOADS = ((16, 50, 0.0), (64, 50, 0.0), (256, 50, 0.0), (512, 50, 0.0), (64, 50, 0.5), (64, 150, 0.0))
SYSTEMS = ("full", "bare")


def _application(builder: str, name: str = BACKEND, route: str | None = None) -> dict[str, Any]:
    return {"name": name, "route_prefix": route, "import_path": f"bench.stream.paced:{builder}"}


class Paced(Launched):
    """A Serve configuration with the paced engine."""

    def __init__(self, folder: Path, rate: int) -> None:
        super().__init__(folder)
        self._rate = rate

    def command(self) -> list[str]:
        shutil.rmtree(self.home, ignore_errors=True)  # a new ledger for every start
        return super().command()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), RATE: str(self._rate)}

    @property
    def facts(self) -> dict[str, Any]:
        return {"engine": "bench/stream/paced.py"}


class Full(Paced):
    """The whole service."""

    name = "full"
    title = "serve-app"

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        settings = deployment(config, "Gateway")["user_config"]
        settings["models"] = {MODEL: {**settings["models"][MODEL], "backends": {BACKEND: 100}}}
        # One account sends the whole load.
        deployment(config, "Limiter")["user_config"]["contract"] = {"rpm": 10**7, "tpm": 10**10, "concurrency": 1024}
        [gateway] = [one for one in config["applications"] if one["import_path"] == "deployments.apps:gateway"]
        config["applications"] = [gateway, _application("app")]
        return config

    def wait_until_ready(self, tree: Tree) -> None:
        super().wait_until_ready(tree)
        _, self.key = self.new_account("bench", "100000")


class Bare(Paced):
    """Ray Serve with a FastAPI ingress that forwards a generator."""

    name = "bare"
    title = "bare Ray Serve"

    def config(self) -> dict[str, Any]:
        config = shipped_config()
        config["applications"] = [_application("bare_model"), _application("bare", "bare", "/")]
        return config

    def command(self) -> list[str]:
        command = super().command()
        # The launcher creates no account if `/models` accepts the first key. This system accepts any key.
        secret_files.secret_file(self.home, "first-api-key", "sk-any")
        return command


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if everything was measured. Raises SystemExit: 1 after a failure, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument(
        "--loads",
        nargs="+",
        type=_load,
        default=list(LOADS),
        metavar="STREAMSxRATE[xHANG_UPS]",
        help="streams, tokens per second of each, share of replies during which the client hangs up; default: "
        + " ".join("x".join(f"{value:g}" for value in one if value) for one in LOADS),
    )
    parser.add_argument("--tokens", type=int, default=500, help="per reply; default: 500")
    parser.add_argument("--warm-up", type=int, default=12, help="seconds before each window; default: 12")
    parser.add_argument("--seconds", type=int, default=15, help="length of each window; default: 15")
    parser.add_argument("--folder", type=Path, default=PEERS, help="folder for logs and state; default: .bench")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: render results written by --json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        results = completed(lambda: measure(options), (ServerError,))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 1 if not results["records"] or any(record["problems"] for record in results["records"]) else 0


def _load(text: str) -> tuple[int, int, float]:
    streams, rate, *hang_ups = text.split("x")
    return int(streams), int(rate), float(hang_ups[0]) if hang_ups else 0.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark and returns the results that `--json` writes."""
    began, records = time.time(), []
    for rate in sorted({rate for _, rate, _ in options.loads}):
        for name in options.only:
            folder = Path(options.folder).absolute() / "stream"
            system: Launched = (Full if name == "full" else Bare)(folder, rate)
            say(f"{system.title}, {rate} tokens/s per stream")
            try:
                system.start()
                assert system.tree is not None
                for its in [its for its in options.loads if its[1] == rate]:
                    records.append(_record(system, system.tree, its, options))
                    say("  " + report.line(records[-1]))
            finally:
                system.stop()
    return {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": time.time() - began,
        "tokens": options.tokens,
        "warm_up_s": options.warm_up,
        "window_s": options.seconds,
        "records": records,
    }


def _record(system: Launched, tree: Tree, its: tuple[int, int, float], options: argparse.Namespace) -> dict[str, Any]:
    streams, rate, hang_ups = its
    load(system.port, system.key, min(streams, 16), rate, rate, 0.5, 2.0)  # makes the processes connect to one another
    before: dict[str, float] = {}
    seen = load(
        system.port,
        system.key,
        streams,
        options.tokens,
        rate,
        options.warm_up,
        options.seconds,
        opened=lambda: before.update(parts.cpu_by_part(tree)),
        hang_ups=hang_ups,
    )
    spent = parts.spent(before, parts.cpu_by_part(tree))
    return {
        "server": system.name,
        "title": system.title,
        "streams": streams,
        "rate": rate,
        "hang_ups": hang_ups,
        "seconds": seen.seconds,
        "tokens_per_s": seen.tokens / seen.seconds,
        "events_per_s": seen.events / seen.seconds,
        "reads_per_s": seen.reads / seen.seconds,
        "gap_ms": report.quantiles(seen.gaps_s),
        "first_ms": report.quantiles(seen.first_s),
        "replies": seen.replies,
        "cores_by_part": {part: seconds / seen.seconds for part, seconds in spent.items()},
        "client_cores": seen.client_cpu_s / seen.seconds,
        "machine_load": os.getloadavg()[0],
        "problems": seen.problems[:5],
    }


if __name__ == "__main__":
    sys.exit(main())
