"""After an outage at 300 settlements a second: live traffic is quick at once, and what was missed drains fast."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.contracts.spool import Spool
from serve_app.gateway.settlements import AccountingShards, Settlements

from .books import COST, Books

RATE = 300
CALM_S, OUTAGE_S = 2.0, 10.0


class Port:
    """AccountingPort in this process."""

    def __init__(self, service: AccountingService) -> None:
        self._service = service

    async def settle(self, batch: list[Settlement]) -> Any:
        return await self._service.settle(batch)

    async def run(self, command: Any) -> Any:
        answer = await self._service.run(command)
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class Nothing:
    """Metrics and a LimiterClient that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.slow
async def test_after_an_outage_live_settlements_are_quick_and_the_spool_drains(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = books.ledger.settle
    is_away = False

    def settle(batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        if is_away:
            time.sleep(0.5)  # a database that is asked, and does not answer
            raise LedgerUnavailable("no answer")
        return real(batch)

    monkeypatch.setattr(books.ledger, "settle", settle)
    # What the ledger does with nothing else to do, in the batches that a replay has.
    begun = time.monotonic()
    for first in range(0, 256 * 8, 256):
        real([books.settlement(f"alone{number}") for number in range(first, first + 256)])
    ledger_rate = 256 * 8 / (time.monotonic() - begun)

    service = AccountingService(books.ledger)
    anything: Any = Nothing()
    spool = Spool(tmp_path / "spool", "gateway")
    gateway = Settlements(AccountingShards([Port(service)]), spool, anything, anything, settle_timeout_s=0.5)
    gateway.start()
    latencies: list[tuple[float, float]] = []  # when it was asked, how long it took
    asked: list[asyncio.Task[None]] = []
    stop = asyncio.Event()

    async def one(number: int) -> None:
        at = time.monotonic()
        settlement = dataclasses.replace(books.settlement(f"live{number}"), finished_at=time.time())
        await gateway.settle(settlement)
        latencies.append((at, time.monotonic() - at))

    async def load() -> None:
        begun = time.monotonic()
        while not stop.is_set():
            while len(asked) < (time.monotonic() - begun) * RATE:
                asked.append(asyncio.create_task(one(len(asked))))
            await asyncio.sleep(0.005)

    loading = asyncio.create_task(load())
    await asyncio.sleep(CALM_S)
    is_away = True
    await asyncio.sleep(OUTAGE_S)
    missed = spool.waiting
    is_away = False
    back = time.monotonic()
    async with asyncio.timeout(60):
        while spool.waiting:
            await asyncio.sleep(0.01)
    drained_s = time.monotonic() - back
    await asyncio.sleep(1)
    stop.set()
    await loading
    await asyncio.gather(*asked)
    await gateway.stop()
    await service.close()

    def p99(start: float, end: float) -> float:
        return statistics.quantiles([took for at, took in latencies if start <= at < end], n=100)[98]

    print(
        f"\nledger alone {ledger_rate:.0f}/s; missed {missed}, drained in {drained_s:.2f} s, "
        f"{missed / drained_s:.0f}/s beside {RATE}/s; p99: calm {p99(0, back - OUTAGE_S):.3f} s, "
        f"outage {p99(back - OUTAGE_S, back):.3f} s, "
        f"after it {p99(back, back + 30):.3f} s"
    )
    assert missed > 0.8 * RATE * (OUTAGE_S - 2)
    assert p99(back, back + 30) < 1.0
    assert missed / drained_s > ledger_rate / 3
    books.ledger._database.engine.dispose()
    assert books.ledger.account_totals(books.account_id).requests == 256 * 8 + len(asked)
    assert books.account.balance == 10**12 - COST * (256 * 8 + len(asked))
    assert books.ledger.check().ok
