"""Compares routers that choose between two replicas, with conversations of several turns: `make bench-routing`.

The routers alternate, and the service is restarted for each measurement. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError
from bench.routing import report
from bench.routing.figures import Waits, summary
from bench.routing.service import REPLICAS, ROUTERS, Routed
from bench.routing.traffic import FLOOD, Caller, TrafficError, script, wait_beside


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every measured promise holds, else 1."""
    options = _options(arguments)
    if options.render:
        results = _merged([json.loads(path.read_text()) for path in options.render])
    else:
        results = completed(lambda: _measure(options), (ServerError, TrafficError, URLError))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if options.docs:
        report.write_docs(options.docs, results)
        say(f"updated {options.docs}")
    return 0 if all(verdict.kept is not False for verdict in report.verdicts(results)) else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    records = []
    for turn in range(options.rounds):
        for router in options.routers if turn % 2 == 0 else options.routers[::-1]:
            records.append({"router": router, "turn": turn, **_turn(router, options)})
            say(f"{router}: {json.dumps(records[-1])}")
    names = ("accounts", "clients", "conversations", "think_s", "kv_cache", "seed")
    plan = {name: getattr(options, name) for name in names}
    return {"routers": ROUTERS, "plan": plan, "records": records, "machine": describe()}


def _merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the records of runs with the same plan. Raises SystemExit if plans differ."""
    if any(run["plan"] != runs[0]["plan"] for run in runs):
        raise SystemExit("bench: the files of --render have different plans")
    return {**runs[0], "records": [record for run in runs for record in run["records"]]}


def _turn(router: str, options: argparse.Namespace) -> dict[str, Any]:
    server = Routed(PEERS, router, options.kv_cache)
    try:
        server.start()
        talking, waits = asyncio.run(_run(server, options))
    finally:
        server.stop()
    return summary([one for one in server.log() if one.account in talking], waits, REPLICAS)


async def _run(server: Routed, options: argparse.Namespace) -> tuple[set[str], Waits]:
    """Runs the load. Returns the accounts of the conversations, and one account's waits during another's load."""
    warm, crowd, one = (Caller(server.port, server.account(name)[1]) for name in ("warm", "crowd", "one"))
    await wait_beside(warm, warm, 8, 0)  # warms up both replicas
    waits: dict[int, list[float]] = {2: [], FLOOD: []}
    for number in range(options.floods):
        for requests, found in waits.items():
            found.append(await wait_beside(crowd, one, requests, options.seed * 1000 + number * 10 + requests % 7))
    accounts = [server.account(f"account {number}") for number in range(options.accounts)]
    await asyncio.gather(
        *(
            Caller(server.port, accounts[client % len(accounts)][1]).hold(
                script(options.seed, client, options.conversations, options.think_s)
            )
            for client in range(options.clients)
        )
    )
    return {account for account, _ in accounts}, Waits(tuple(waits[2]), tuple(waits[FLOOD]))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="alternate rounds run backwards; default: 2")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--accounts", type=int, default=4, help="default: 4")
    parser.add_argument("--clients", type=int, default=10, help="default: 10")
    parser.add_argument("--conversations", type=int, default=2, help="per client; default: 2")
    parser.add_argument("--think-s", type=float, default=4.0, help="mean seconds between turns; default: 4")
    parser.add_argument("--kv-cache", default="320MiB", help="per replica; default: 320MiB")
    parser.add_argument("--floods", type=int, default=3, help="rounds of the flood; default: 3")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to OUT")
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="IN", help="measure nothing: render results written by --json"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="update this document, such as docs/benchmarks.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
