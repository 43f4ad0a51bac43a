"""Rounds of faults on the nodes, and checks of what must hold afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.service.chaos import books, session
from tests.service.chaos.report import Report
from tests.service.chaos.stand import Customer, StandError
from tests.service.drill.cluster import Cluster
from tests.service.drill.load import CLIENTS, Load, Seen, long_streams
from tests.service.drill.nodes import HEAD
from tests.service.drill.serve_view import KINDS

OUTAGE: Final = "outage"  # a gateway's node, while the database is away: usage that clients have is in its spool alone
ALL_KINDS: Final = (HEAD, *KINDS, OUTAGE)
MONEY: Final = 10**13  # nano-units
BEFORE_S: Final = 5.0
BETWEEN_S: Final = 5.0
AWAY_S: Final = 3.0  # keys are good for two seconds more
WHOLE_S: Final = 240.0
SETTLED_S: Final = 120.0
STREAMS: Final = 8
DRAINED_S: Final = 800.0  # a head is never idle, so it takes the whole time of a drain, 750 s

Say = Callable[[str], None]


async def losses(cluster: Cluster, rounds: int, kinds: Sequence[str], say: Say) -> Report:
    """`kill -9` of a node of each kind under load, `rounds` times."""
    began = time.monotonic()
    assert cluster.postgres is not None
    customers = [await asyncio.to_thread(Customer, cluster, f"customer {number}", MONEY) for number in range(4)]
    load = Load(cluster.base_url, customers)
    report = Report("node loss", 0, 0.0, cluster.facts())
    say("learning the replies")
    await load.learn()
    seen, whole = load.seen, list[float]()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run())
        await asyncio.sleep(BEFORE_S)
        try:
            for number in range(rounds):
                for kind in kinds:
                    node = await asyncio.to_thread(cluster.having, "gateway" if kind == OUTAGE else kind, number)
                    lost = await asyncio.to_thread(cluster.on, node)
                    had = sorted({one.deployment[1] for one in lost})
                    say(
                        f"round {number + 1}, {kind}: kill -9 of node {node.name}, which has {', '.join(had) or 'none'}"
                    )
                    cut, wrong, lost_at = seen.cut, len(seen.wrong), time.monotonic()
                    if kind == OUTAGE:
                        await asyncio.to_thread(cluster.postgres.kill)
                        await asyncio.sleep(AWAY_S)
                    await asyncio.to_thread(cluster.lose, node)
                    if kind == OUTAGE:
                        await asyncio.to_thread(cluster.postgres.start)
                    gone = frozenset(one.id for one in lost)
                    await asyncio.to_thread(cluster.wait_until_whole, WHOLE_S, gone)
                    await _until_served(seen)
                    whole.append(time.monotonic() - lost_at)
                    await asyncio.sleep(BETWEEN_S)
                    say(
                        f"whole after {whole[-1]:.0f} s; {seen.calls} calls, {seen.streams} streams, "
                        f"{seen.cut - cut} cut, {len(seen.wrong) - wrong} wrong"
                    )
                    report.disturbances[kind] = report.disturbances.get(kind, 0) + 1
                    # A stream's connection ends with its gateway; nothing else may cut one.
                    if seen.cut > cut and "Gateway" not in had:
                        report.problems.append(f"{seen.cut - cut} streams were cut when {kind} was lost")
        except StandError as error:
            report.problems.append(str(error))
        load.end()
        say("the load has ended: waiting for running requests")
        await running
    await load.close()
    report.seconds = time.monotonic() - began
    report.answers = {"calls": seen.calls, "streams": seen.streams, "streams cut with their gateway": seen.cut}
    report.problems += seen.wrong[: books.MAX_LINES] + seen.tally.wrong
    say("comparing the books")
    try:
        kept, wrong_books = await asyncio.to_thread(
            books.close_when_settled,
            cluster,
            customers,
            seen.tally.received,
            seen.tally.sent,
            SETTLED_S,
            late_spools=OUTAGE in kinds,
        )
    except StandError as error:
        report.problems.append(str(error))
        return report
    report.problems += wrong_books
    report.figures = {**session.figures(kept, seen.tally), "slowest recovery, s": max(whole, default=0.0)}
    return report


async def _until_served(seen: Seen) -> None:
    """Until calls are complete again: a limiter on another machine first waits for the lease of the lost one."""
    enough, deadline = seen.calls + CLIENTS, time.monotonic() + WHOLE_S
    while seen.calls < enough:
        if time.monotonic() > deadline:
            raise StandError(f"no {CLIENTS} calls were complete within {WHOLE_S:.0f} s")
        await asyncio.sleep(0.2)


async def drains(cluster: Cluster, kinds: Sequence[str], tokens: int, say: Say) -> Report:
    """SIGTERM to a node of each kind while long streams run."""
    began = time.monotonic()
    customer = await asyncio.to_thread(Customer, cluster, "drained", MONEY)
    report = Report("drain", 0, 0.0, cluster.facts())
    for number, kind in enumerate(one for one in kinds if one != OUTAGE):
        begun = asyncio.Event()
        streams = asyncio.create_task(long_streams(cluster.base_url, customer, tokens, begun, STREAMS))
        started = time.monotonic()
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({streams, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        node = await asyncio.to_thread(cluster.having, kind, number)
        had = sorted({one.deployment[1] for one in await asyncio.to_thread(cluster.on, node)})
        say(f"{kind}: SIGTERM to node {node.name} with {', '.join(had) or 'no replica'}")
        ending = asyncio.create_task(asyncio.to_thread(cluster.drain, node, DRAINED_S))
        wrong = await streams
        lasted = time.monotonic() - started
        report.problems += [f"{kind}: {problem}" for problem in wrong]
        try:
            ended = await ending
            await asyncio.to_thread(cluster.wait_until_whole, WHOLE_S)
        except StandError as error:
            report.problems.append(f"{kind}: {error}")
            break
        say(f"streams lasted {lasted:.0f} s, {len(wrong)} were cut; the node ended after {ended:.0f} s")
        report.disturbances[kind] = 1
        report.figures[f"streams beside {kind}, s"] = lasted
    report.seconds = time.monotonic() - began
    return report
