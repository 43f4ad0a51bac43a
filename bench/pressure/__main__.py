"""Simulates a day and an overload with the service's own limits: `make bench-pressure`, or `python -m bench.pressure`.

All figures come from a model of the replicas: the same seed gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.pressure import day, overload, plot, report
from bench.pressure.world import Scaling


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every promise holds, else 1."""
    options = _options(arguments)
    results = json.loads(options.render.read_text()) if options.render else simulate(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot_dir:
        options.plot_dir.mkdir(parents=True, exist_ok=True)
        plot.draw(results, options.plot_dir)
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        print(f"bench: updated {options.docs}", file=sys.stderr)
    return 0 if all(kept for _, _, _, kept in report.promises(results)) else 1


def simulate(options: argparse.Namespace) -> dict[str, object]:
    """Runs the simulations and returns the results, for JSON."""
    began = time.perf_counter()
    outcomes = []
    for seed in range(options.seed, options.seed + options.overloads):
        _, outcome = overload.run(seed)
        outcomes.append(asdict(outcome))
    scaling = Scaling(least=min(2, options.replicas), most=options.replicas)
    found = day.simulate(options.seed, options.accounts, options.hours, scaling)
    return {
        "seed": options.seed,
        "seconds": time.perf_counter() - began,
        "overload": outcomes,
        "weights": list(overload.WEIGHTS),
        "scaling": asdict(scaling),
        "day": found,
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pressure", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--accounts", type=int, default=3_000, help="accounts of the crowd; default: 3000")
    parser.add_argument("--replicas", type=int, default=4, help="maximum number of replicas; default: 4")
    parser.add_argument("--hours", type=float, default=24.0, help="length of the simulated day; default: 24")
    parser.add_argument("--overloads", type=int, default=3, help="runs of the overload, with new seeds; default: 3")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="simulate nothing: render results written by --json")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="write the plots as SVG")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
