"""Measures the service with a model that replies immediately: `make bench-gateway`, or `python -m bench.gateway`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.gateway import costs, load, report, speedups
from bench.gateway.session import Scope, Session
from bench.gateway.systems import SYSTEMS, find_systems
from bench.gateway.without.sitecustomize import COSTS, SPEEDUPS
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.peers import installed
from bench.harness.servers import ServerError


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if everything was measured. Raises SystemExit: 1 after a failure, 130 after Ctrl-C."""
    options = _options(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        results = completed(lambda: measure(options), (load.LoadError, ServerError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    reporting = costs if "costs" in results else speedups if "speedups" in results else report
    print(reporting.markdown(results))
    if options.docs:
        reporting.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 0 if results["records"] and not any(record["problems"] for record in results["records"]) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    usual = Scope()
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    which.add_argument(
        "--without",
        nargs="*",
        choices=SPEEDUPS,
        metavar="NAME",
        help=f"instead, compare the service with and without these speed-ups; default: {', '.join(SPEEDUPS)}",
    )
    which.add_argument(
        "--costs",
        nargs="*",
        choices=COSTS,
        metavar="NAME",
        help=f"instead, measure what these parts cost; default: {', '.join(COSTS)}",
    )
    parser.add_argument(
        "--gateways",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="gateway processes of the service; several numbers are compared; default: 1",
    )
    parser.add_argument("--clients", nargs="+", type=int, help="default: 1 16 64; for --without 16 64, for --costs 16")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"default: {usual.rounds}; with --without, {speedups.SCOPE.rounds}; with --costs, {costs.SCOPE.rounds}",
    )
    parser.add_argument(
        "--seconds", type=int, help=f"of each load; default: {usual.window_s}; with --costs, {costs.SCOPE.window_s}"
    )
    parser.add_argument("--warm-up", type=int, default=usual.warm_up_s, help=f"seconds; default: {usual.warm_up_s}")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the installed peer; default: .bench")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: render results written by --json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark and returns the results. Raises LoadError if wrk is not installed."""
    load.check_wrk()
    usual = costs.SCOPE if options.costs is not None else speedups.SCOPE if options.without is not None else Scope()
    clients = tuple(options.clients or usual.clients)
    scope = Scope(options.rounds or usual.rounds, clients, options.warm_up, options.seconds or usual.window_s)
    began = time.time()
    if options.costs is not None:
        results = costs.measure(_folder(options), options.costs or list(COSTS), scope)
    elif options.without is None:
        results = _systems(options, scope)
    else:
        results = speedups.measure(_folder(options), options.without or list(SPEEDUPS), scope)
    return {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": time.time() - began,
        "rounds": scope.rounds,
        "window_s": scope.window_s,
        "warm_up_s": scope.warm_up_s,
        **results,
    }


def _systems(options: argparse.Namespace, scope: Scope) -> dict[str, Any]:
    systems, missing = find_systems(
        _folder(options), tuple(options.only), installed(options.peers, "litellm"), tuple(options.gateways)
    )
    if not systems:
        raise ServerError(f"none of the chosen systems is installed: {missing}")
    session = Session(systems, scope)
    session.run()
    return {
        "servers": {system.name: {"title": system.title, "facts": system.facts} for system in systems},
        "missing": {**missing, **session.missing},
        "records": session.records,
        "audits": session.audits,
    }


def _folder(options: argparse.Namespace) -> Path:
    return Path(options.peers).absolute() / "gateway"


if __name__ == "__main__":
    sys.exit(main())
