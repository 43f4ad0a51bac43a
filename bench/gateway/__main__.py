"""Measures the whole path around a model that answers at once: `make bench-gateway`, or `python -m bench.gateway`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.engine.machine import describe
from bench.engine.processes import interrupted_by_sigterm
from bench.gateway import load, report
from bench.gateway.session import Scope, Session, say
from bench.gateway.systems import ROOT, SYSTEMS, NotReady, find_systems
from bench.peers import installed
from serve_app.launch.processes import adopt_orphans


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when the run is whole, 1 when something could not be measured, 130 after Ctrl-C."""
    options = _options(arguments)
    if options.render:
        results = json.loads(options.render.read_text())
    else:
        adopt_orphans()  # a system's children that outlive it are ended too
        try:
            with interrupted_by_sigterm():
                results = measure(options)
        except KeyboardInterrupt:
            say("stopped; all that was started has ended")
            return 130
        except (load.LoadError, NotReady) as error:
            say(str(error))
            return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"{options.docs} is written")
    return 0 if results["records"] and not any(record["problems"] for record in results["records"]) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    usual = Scope()
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--clients", nargs="+", type=int, default=list(usual.clients), help="default: 1 16 64")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help=f"default: {usual.rounds}")
    parser.add_argument("--seconds", type=int, default=usual.window_s, help=f"of each load; default: {usual.window_s}")
    parser.add_argument("--warm-up", type=int, default=usual.warm_up_s, help=f"seconds; default: {usual.warm_up_s}")
    parser.add_argument("--peers", type=Path, default=ROOT / ".bench", help="folder of setup_peer; default: .bench")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything measured")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: render what --json wrote")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="renew tables and plot, as in docs/benchmarks.md")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as `--json` writes it. Raises LoadError where there is no wrk."""
    load.check_wrk()
    folder: Path = options.peers.absolute()
    systems, missing = find_systems(folder / "gateway", tuple(options.only), installed(folder, "litellm"))
    if not systems:
        raise NotReady(f"none of the chosen systems is installed: {missing}")
    began = time.time()
    scope = Scope(options.rounds, tuple(options.clients), options.warm_up, options.seconds)
    session = Session(systems, scope)
    session.run()
    return {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": time.time() - began,
        "rounds": scope.rounds,
        "window_s": scope.window_s,
        "warm_up_s": scope.warm_up_s,
        "servers": {system.name: {"title": system.title, "facts": system.facts} for system in systems},
        "missing": {**missing, **session.missing},
        "records": session.records,
        "audits": session.audits,
    }


if __name__ == "__main__":
    sys.exit(main())
