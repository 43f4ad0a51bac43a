"""Takes whole nodes from a Ray cluster under load, and proves that calls, streams and books outlive them.

A head and three nodes, each a machine of its own to the others, with Redis, PostgreSQL and a load balancer. Sixteen
clients of the official SDK with default retries. Needs root on Linux. The exit status is 0 when all holds, 1 when
something does not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from bench.harness.command import interrupted_by_sigterm
from tests.service.chaos.report import Report
from tests.service.chaos.stand import StandError
from tests.service.drill import network, rounds
from tests.service.drill.cluster import Cluster, kept_weights, prepare_weights


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = _options(arguments)
    try:
        if not network.is_inside():
            if problem := network.missing(kept_weights()):
                raise StandError(problem)
            prepare_weights(say)
            network.enter(sys.argv[1:] if arguments is None else arguments)
        network.make()
        with interrupted_by_sigterm():
            reports = _run(options)
    except KeyboardInterrupt:
        say("stopped; all that was started has ended")
        return 130
    except StandError as error:
        say(str(error))
        return 1
    if options.json:
        print(json.dumps([report.document() for report in reports], indent=1))
    else:
        print("\n".join(report.text() for report in reports))
    return int(any(report.problems for report in reports))


def say(text: str) -> None:
    """Reports progress; standard output is for the report alone."""
    print(f"{time.strftime('%H:%M:%S')} drill: {text}", file=sys.stderr, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.service.drill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often a node of each kind is lost; default 5")
    parser.add_argument("--kinds", nargs="+", choices=rounds.ALL_KINDS, default=rounds.ALL_KINDS, help="default all")
    parser.add_argument("--no-drains", action="store_true", help="without SIGTERM during long streams")
    parser.add_argument("--tokens", type=int, default=3600, help="of each long stream; default 3600, about a minute")
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON document")
    return parser.parse_args(arguments)


async def _all(cluster: Cluster, options: argparse.Namespace) -> list[Report]:
    """Runs on one loop: a node ends with the thread that started it, and these threads end with their loop."""
    reports = []
    if options.rounds:
        reports.append(await rounds.losses(cluster, options.rounds, options.kinds, say))
    if not options.no_drains and not any(report.problems for report in reports):
        reports.append(await rounds.drains(cluster, options.kinds, options.tokens, say))
    return reports


def _run(options: argparse.Namespace) -> list[Report]:
    with Cluster(say) as cluster:
        reports = asyncio.run(_all(cluster, options))
        if any(report.problems for report in reports):
            cluster.keep = True
            say(f"logs stay in {cluster.folder}")
        return reports


if __name__ == "__main__":
    sys.exit(main())
