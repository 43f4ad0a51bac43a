"""Kills the parts of a running service at random, under load, and proves that its books stay exact.

Afterwards every usage that a client received is in the ledger exactly once with the same counts, `ledger check` is
clean, all holds are gone, no balance was ever negative, and the service replies. The exit status is 0 when all of that
holds, 1 when something does not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from bench.harness.command import interrupted_by_sigterm
from tests.service.chaos import revocation, schedule, session
from tests.service.chaos.outage import Outage
from tests.service.chaos.report import Report
from tests.service.chaos.stand import Shape, Stand, StandError

SMALL = 2 * 10**6  # nano-units: a balance for twenty to thirty requests of the mix
LARGE = 10**10  # what is held while the database is away counts against the balance


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = _options(arguments)
    try:
        with interrupted_by_sigterm():
            report = _run(options)
    except KeyboardInterrupt:
        say("stopped; all that was started has ended")
        return 130
    except StandError as error:
        say(str(error))
        return 1
    print(json.dumps(report.document(), indent=1) if options.json else report.text())
    return 1 if report.problems else 0


def say(text: str) -> None:
    """Reports progress; standard output is for the report alone."""
    print(f"{time.strftime('%H:%M:%S')} chaos: {text}", file=sys.stderr, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.service.chaos", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--minutes", type=float, default=5.0, help="of load with random kills; default 5")
    mode.add_argument(
        "--outage", type=float, metavar="SECONDS", help="instead: the database away once, for so long (PostgreSQL)"
    )
    mode.add_argument(
        "--revocation", action="store_true", help="instead: how soon revocations and top-ups reach all gateways"
    )
    parser.add_argument("--seed", type=int, default=1, help="of kills and load; default 1")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite", help="default sqlite")
    parser.add_argument("--limiter-shards", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--accounting-shards", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--gateways", type=int, metavar="N", help="default 1, with --revocation 3")
    parser.add_argument("--models", type=int, default=1, metavar="N", help="replicas of the backend; default 1")
    parser.add_argument("--stub", action="store_true", help="a backend without a model, which starts in a moment")
    parser.add_argument("--clients", type=int, default=16, help="at once; default 16")
    parser.add_argument(
        "--kinds", nargs="+", choices=schedule.KINDS, help="what is killed; default all, the database if PostgreSQL"
    )
    parser.add_argument("--spool-max-bytes", type=int, metavar="BYTES", help="with --outage: a low bound, for 503s")
    parser.add_argument("--times", type=int, default=40, help="with --revocation: how often; default 40")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")
    options = parser.parse_args(arguments)
    if options.outage and options.database != "postgresql":
        parser.error("--outage needs --database postgresql: SQLite has no server that could be away")
    if options.kinds and "database" in options.kinds and options.database != "postgresql":
        parser.error("--kinds database needs --database postgresql: SQLite has no server that could be killed")
    if options.spool_max_bytes and not options.outage:
        parser.error("--spool-max-bytes is for --outage")
    if options.gateways is None:
        options.gateways = 3 if options.revocation else 1
    return options


def _run(options: argparse.Namespace) -> Report:
    settings = {} if options.spool_max_bytes is None else {"spool_max_bytes": options.spool_max_bytes}
    shape = Shape(
        options.database,
        options.limiter_shards,
        options.accounting_shards,
        options.gateways,
        options.stub,
        options.models,
        settings,
    )
    with Stand(shape, say) as stand:
        report = asyncio.run(_mode(options, stand))
        if report.problems:
            stand.keep = True
            say(f"logs stay in {stand.folder}")
        return report


async def _mode(options: argparse.Namespace, stand: Stand) -> Report:
    common = {"seed": options.seed, "clients": options.clients, "say": say}
    if options.revocation:
        began = time.monotonic()
        revoked, usable, wrong = await revocation.measure(stand, options.times, say)
        return revocation.report(stand, revoked, usable, wrong, time.monotonic() - began)
    if options.outage:
        outage = Outage(options.outage)
        report = await session.run(stand, outage, mode="outage", credit=LARGE, top_up=0, **common)
        outage.judge(report, low_bound=options.spool_max_bytes is not None)
        return report
    kinds = options.kinds or [kind for kind in schedule.KINDS if kind != "database" or stand.postgres is not None]
    seconds = 60 * options.minutes
    disturb = session.kill_by(schedule.plan(options.seed, seconds, kinds), seconds)
    return await session.run(stand, disturb, mode="kills", credit=SMALL, top_up=SMALL, **common)


if __name__ == "__main__":
    sys.exit(main())
