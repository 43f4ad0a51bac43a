"""Rounds of faults on the nodes, and checks of what must hold afterwards."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.service.chaos import books, session
from tests.service.chaos.report import Report
from tests.service.chaos.stand import Customer, StandError
from tests.service.drill.cluster import Cluster
from tests.service.drill.load import CLIENTS, Load, Seen, long_streams
from tests.service.drill.nodes import HEAD
from tests.service.drill.serve_view import KINDS, Replica

OUTAGE: Final = "outage"  # a gateway's node with its disk, while the database is away: replicas settle what it spooled
PROCESS: Final = "process"  # one of a node's gateway processes, while the database is away: the other one settles
COME_AND_GO: Final = "come and go"  # another gateway starts and one leaves: nothing is lost, and no stream is cut
AT_GATEWAYS: Final = (OUTAGE, PROCESS, COME_AND_GO)
ALL_KINDS: Final = (HEAD, *KINDS, *AT_GATEWAYS)
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
    """Loses a node of each kind under load, and starts and loses gateways, `rounds` times."""
    began = time.monotonic()
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
                    say(f"round {number + 1}, {kind}")
                    cut, wrong, lost_at = seen.cut, len(seen.wrong), time.monotonic()
                    lost = await _disturb(cluster, kind, number, say)
                    had = {one.deployment[1] for one in lost}
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
            late_spools=not {OUTAGE, PROCESS}.isdisjoint(kinds),
        )
    except StandError as error:
        report.problems.append(str(error))
        return report
    report.problems += wrong_books
    report.figures = {**session.figures(kept, seen.tally), "slowest recovery, s": max(whole, default=0.0)}
    return report


async def _disturb(cluster: Cluster, kind: str, number: int, say: Say) -> list[Replica]:
    """Returns the replicas that were lost. Raises StandError."""
    assert cluster.postgres is not None
    if kind == COME_AND_GO:
        for difference in (1, -1):
            await asyncio.to_thread(cluster.scale_gateways, difference, WHOLE_S)
            await asyncio.sleep(BETWEEN_S)
        return []
    if kind in AT_GATEWAYS:
        await asyncio.to_thread(cluster.postgres.kill)
        await asyncio.sleep(AWAY_S)
    if kind == PROCESS:
        lost = [await asyncio.to_thread(cluster.kill_gateway)]
        say(f"kill -9 of a gateway on {lost[0].address}")
    else:
        node = await asyncio.to_thread(cluster.having, "gateway" if kind == OUTAGE else kind, number)
        lost = await asyncio.to_thread(cluster.on, node)
        had = sorted({one.deployment[1] for one in lost})
        say(f"kill -9 of node {node.name}, which has {', '.join(had) or 'none'}")
        await asyncio.to_thread(cluster.lose, node)
    if kind in AT_GATEWAYS:
        await asyncio.to_thread(cluster.postgres.start)
    return lost


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
    for number, kind in enumerate(one for one in kinds if one not in AT_GATEWAYS):
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
        try:
            wrong = await streams
            lasted = time.monotonic() - started
            report.problems += [f"{kind}: {problem}" for problem in wrong]
            ended = await ending
            await asyncio.to_thread(cluster.wait_until_whole, WHOLE_S)
        except asyncio.CancelledError:
            node.machine.signal(signal.SIGKILL)  # so that Ctrl-C does not wait for the drain
            raise
        except StandError as error:
            report.problems.append(f"{kind}: {error}")
            break
        say(f"streams lasted {lasted:.0f} s, {len(wrong)} were cut; the node ended after {ended:.0f} s")
        report.disturbances[kind] = 1
        report.figures[f"streams beside {kind}, s"] = lasted
    report.seconds = time.monotonic() - began
    return report
