"""Starts a service and attacks it while ordinary clients measure their latency: `make attack`.

Everything stays on this machine: the service listens on loopback, and no other target can be chosen. Run nothing else
on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

from bench.attack import report
from bench.attack.processes import more_files
from bench.attack.service import Attacked, make_accounts
from bench.attack.session import NAMES, Scope, Session
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError

QUICK = Scope(calm_s=5, attack_s=6, recovery_s=1, control_s=0)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, even if a promise fails. Raises SystemExit: 1 after a failure, 130 after Ctrl-C."""
    options = _options(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        results = completed(lambda: measure(scope_of(options)), (ServerError, URLError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 0


def measure(scope: Scope) -> dict[str, Any]:
    """Runs the test and returns the results. Stops everything that it started before it returns or raises."""
    began = time.time()
    server = Attacked(PEERS)
    try:
        server.start()
        files = more_files()  # raises this process's limit only now: the service has started with the usual one
        accounts = make_accounts(server, scope.new_keys())
        say(f"the service replies after {time.time() - began:.0f} s; {files:,} files may be open")
        results = asyncio.run(Session(server, accounts, scope).run())
    finally:
        server.stop()
    return {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": time.time() - began,
        "open_files": files,
        "scope": asdict(scope),
        **results,
    }


def scope_of(options: argparse.Namespace) -> Scope:
    scope = QUICK if options.quick else Scope()
    if options.only:
        scope = replace(scope, attacks=tuple(name for name in NAMES if name in options.only))
    if options.seconds is not None:
        scope = replace(scope, attack_s=options.seconds)
    if options.no_control:
        scope = replace(scope, control_s=0)
    return replace(scope, per_s=options.rate, seed=options.seed)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    usual = Scope()
    parser = argparse.ArgumentParser(prog="python -m bench.attack", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="attacks; default: all")
    parser.add_argument("--quick", action="store_true", help="short windows and no control: two minutes")
    parser.add_argument("--seconds", type=_seconds, help=f"of each attack, at most 60; default: {usual.attack_s:g}")
    parser.add_argument("--no-control", action="store_true", help="omit the control")
    parser.add_argument(
        "--rate", type=_rate, default=usual.per_s, help=f"ordinary requests per second; default: {usual.per_s:g}"
    )
    parser.add_argument("--seed", type=int, default=usual.seed, help=f"of ordinary requests; default: {usual.seed}")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: render results written by --json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    if not 1 <= (value := float(text)) <= 60:
        raise argparse.ArgumentTypeError("must be from 1 to 60 seconds")
    return value


def _rate(text: str) -> float:
    if not 1 <= (value := float(text)) <= 100:
        raise argparse.ArgumentTypeError("must be from 1 to 100 per second")
    return value


if __name__ == "__main__":
    sys.exit(main())
