"""One run: customers, load, disturbance, and the books afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.service.chaos import books
from tests.service.chaos.load import Load, Tally, draw
from tests.service.chaos.report import Report
from tests.service.chaos.schedule import Kill
from tests.service.chaos.stand import Customer, Stand, StandError, as_nano

CUSTOMERS = 8
SETTLED_S = 120.0
POLL_S = 0.5
PATIENCE_S = 300.0
TOP_UP_S = 1.0

Disturb = Callable[["Session"], Awaitable[None]]


@dataclass(slots=True)
class Session:
    """Objects and counts that a disturbance works with."""

    stand: Stand
    load: Load
    customers: Sequence[Customer]
    say: Callable[[str], None]
    killed: Counter[str] = field(default_factory=Counter)
    lowest: int = 2**62  # balance that was ever shown, nano-units
    began: float = field(default_factory=time.monotonic)

    @property
    def tally(self) -> Tally:
        return self.load.tally

    async def more(self, usages: int) -> None:
        """Returns when clients have received so many usages from now on. Raises TimeoutError."""
        wanted = len(self.tally.received) + usages
        await self.until(lambda: len(self.tally.received) >= wanted)

    async def until(self, look: Callable[[], bool]) -> None:
        """Returns as soon as `look` is true. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while not look():
                await asyncio.sleep(POLL_S / 10)


async def run(
    stand: Stand,
    disturb: Disturb,
    *,
    mode: str,
    seed: int,
    clients: int,
    credit: int,
    top_up: int,
    say: Callable[[str], None] = lambda _: None,
    settled_s: float = SETTLED_S,
) -> Report:
    """Loads the service, disturbs it, and proves its books.

    Each customer begins with `credit` nano-units and gets `top_up` more whenever less than half of that is left.
    """
    customers = [await asyncio.to_thread(Customer, stand, f"customer {number}", credit) for number in range(CUSTOMERS)]
    session = Session(stand, Load(stand, customers, clients, seed), customers, say)
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(session.load.run())
        group.create_task(_watch(session, over))
        if top_up:
            group.create_task(_top_up(session, over, top_up))
        await disturb(session)
        session.load.end()
        say("the load has ended: waiting for running requests")
        await loading
        over.set()
    tally = session.tally
    say("waiting for the service to reply")
    report = Report(mode, seed, time.monotonic() - session.began, stand.facts())
    report.disturbances, report.answers = dict(session.killed), dict(sorted(tally.answers.items()))
    report.problems += tally.wrong[: books.MAX_LINES]
    if session.lowest < 0:
        report.problems.append(f"a balance of {session.lowest} nano-units was shown")
    if problem := await _whole_request(stand, settled_s):
        report.problems.append(problem)
    say("comparing the books")
    try:
        kept, wrong = await asyncio.to_thread(
            books.close_when_settled, stand, customers, tally.received, tally.sent, settled_s
        )
    except StandError as error:
        report.problems.append(str(error))
        return report
    report.problems += wrong
    report.figures = figures(kept, tally)
    return report


def figures(kept: books.Books, tally: Tally) -> dict[str, Any]:
    """Counts for the report."""
    received = {usage.request_id for usage in kept.received}
    outcomes = Counter(row.outcome for row in kept.rows)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tally.received_at)]
    return {
        "requests": sum(tally.sent.values()),
        "usages received": len(received),
        "of them in the ledger once, with the same counts": len(received & {row.request_id for row in kept.rows}),
        **{f"{outcome} in the ledger": count for outcome, count in sorted(outcomes.items())},
        "charged, nano-units": sum(row.charged for row in kept.rows),
        "uncollected, nano-units": sum(row.uncollected for row in kept.rows),
        "longest time without a usage, s": max(gaps, default=0.0),
    }


def kill_by(plan: Sequence[Kill], seconds: float) -> Disturb:
    """Kills as planned, within `seconds` of load."""

    async def disturb(session: Session) -> None:
        async with asyncio.TaskGroup() as group:
            for kill in plan:
                await _until(session.began + kill.at_s)
                if kill.kind == "database":
                    group.create_task(crash_database(session, kill.down_s))
                else:
                    await asyncio.to_thread(_kill_process, session, kill)
            await _until(session.began + seconds)

    return disturb


def _kill_process(session: Session, kill: Kill) -> None:
    pids = session.stand.pids(kill.kind)
    if not pids:
        session.say(f"{kill.kind}: none runs just now")
        session.killed[f"{kill.kind}, not there"] += 1
        return
    pid = pids[int(kill.pick * len(pids))]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    session.say(f"{kill.kind}: killed process {pid}, one of {len(pids)}")
    session.killed[kill.kind] += 1


async def crash_database(session: Session, down_s: float) -> None:
    """SIGKILL to the PostgreSQL server; started again after `down_s`."""
    postgres = session.stand.postgres
    assert postgres is not None
    await asyncio.to_thread(postgres.kill)
    session.say(f"database: killed for {down_s:.1f} s")
    session.killed["database"] += 1
    await asyncio.sleep(down_s)
    await asyncio.to_thread(postgres.start)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def _watch(session: Session, over: asyncio.Event) -> None:
    """Reads the balances that the service shows, again and again."""
    async for _ in _every(POLL_S, over):
        with contextlib.suppress(StandError):
            page = await asyncio.to_thread(session.stand.admin, "GET", "/admin/accounts?limit=100", patience_s=0)
            balances = [as_nano(account["balance"]) for account in page["data"]]
            session.lowest = min(session.lowest, *balances)


async def _top_up(session: Session, over: asyncio.Event, amount: int) -> None:
    async for _ in _every(TOP_UP_S, over):
        with contextlib.suppress(StandError):
            page = await asyncio.to_thread(session.stand.admin, "GET", "/admin/accounts?limit=100", patience_s=0)
            poor = {account["id"] for account in page["data"] if as_nano(account["balance"]) < amount // 2}
            for customer in session.customers:
                if customer.id in poor:
                    await asyncio.to_thread(customer.top_up, amount)


async def _every(seconds: float, over: asyncio.Event) -> AsyncIterator[None]:
    while not over.is_set():
        yield None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), seconds)


async def _whole_request(stand: Stand, patience_s: float) -> str | None:
    """None when a request of a new customer succeeds within `patience_s`, else the failure."""
    customer = await asyncio.to_thread(Customer, stand, "afterwards", 10**9)
    deadline = time.monotonic() + patience_s
    problem = ""
    async with httpx.AsyncClient(base_url=stand.base_url, timeout=60, trust_env=False, verify=stand.verify) as http:
        while time.monotonic() < deadline:
            try:
                headers = {"authorization": f"Bearer {customer.key}"}
                answer = await http.post("/v1/chat/completions", json=draw(Random(0)).body(), headers=headers)
                if answer.status_code == 200:
                    return None
                problem = f"{answer.status_code}: {answer.text}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5)
    return f"the service does not reply any more: {problem}"
