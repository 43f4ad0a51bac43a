"""Simulates days of traffic with the scaling rule, Serve's policy and KEDA's: `python -m bench.autoscaling`.

All figures come from a model of the replicas: the same seeds give the same figures on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.autoscaling import plot, report
from bench.autoscaling.days import FLEET, TUNED_ON, Job, simulate
from bench.autoscaling.traffic import SHAPES
from bench.autoscaling.tune import BEFORE, CHOSEN, tuned
from bench.harness.command import say


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every promise holds, else 1."""
    options = _options(arguments)
    results = json.loads(options.render.read_text()) if options.render else measure(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot_dir:
        options.plot_dir.mkdir(parents=True, exist_ok=True)
        plot.draw(results, options.plot_dir)
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 0 if all(kept for *_, kept in report.promises(results)) else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Simulates all days with the chosen settings. With --tune, chooses the settings first."""
    began = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:

        def days(jobs: Iterable[Job]) -> list[dict[str, Any]]:
            found = []
            for figures in pool.map(simulate, list(jobs)):
                found.append(figures)
                say(
                    f"{figures['shape']}, seed {figures['seed']}, {figures['settings']}: cost {figures['cost']:.0f}, "
                    f"refused {figures['refused']:.2%}, first token {figures['first_p95_s']:.1f} s"
                )
            return found

        chosen, tried = tuned(options.shapes, days) if options.tune else (CHOSEN, [])
        plan = [
            (policy, Job(shape, tuning, seed))
            for shape in options.shapes
            for policy, tuning in (*chosen[shape].items(), ("before", BEFORE))
            for seed in range(options.seed, options.seed + options.seeds)
        ]
        figures = days(job for _, job in plan)
    records = [one | {"policy": policy} for (policy, _), one in zip(plan, figures, strict=True)]
    return {
        "seconds": time.perf_counter() - began,
        "tuned_on": TUNED_ON,
        "fleet": {"least": FLEET.least, "most": FLEET.most, "start_s": FLEET.start_s, "price": FLEET.price_per_hour},
        "tried": [{key: value for key, value in one.items() if key != "replicas"} for one in tried],
        "records": records,
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed; default: 1")
    parser.add_argument("--seeds", type=int, default=3, help="days of each shape; default: 3")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--tune", action="store_true", help="choose the settings of all policies again; takes twice as long"
    )
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument("--render", type=Path, metavar="IN", help="simulate nothing: render results written by --json")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="write the plot as SVG")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
