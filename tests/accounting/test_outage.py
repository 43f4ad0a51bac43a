"""Clients settle through an outage of PostgreSQL: nothing is lost or billed twice, and settling goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.accounting import accounting_service
from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import Settled
from serve_app.contracts.errors import LedgerUnavailable

from .books import COST, Books, Ledger
from .proxy import Proxy, proxy_of

CLIENTS = 20
FEW = 2 * CLIENTS
HURRY_S = 0.3  # the bound of a call during the outage


class Clients:
    """They settle one request after the other and repeat what got no answer, as gateways do."""

    def __init__(self, service: AccountingService, books: Books) -> None:
        self.settled = self.unanswered = 0
        self._service, self._books = service, books
        self._stopping = False
        self._running = [asyncio.create_task(self._run(number)) for number in range(CLIENTS)]

    async def _run(self, number: int) -> None:
        turn = 0
        while not self._stopping:
            settlement = self._books.settlement(f"{number}-{turn}")
            while isinstance(answer := (await self._service.settle([settlement]))[0], LedgerUnavailable):
                self.unanswered += 1
            assert isinstance(answer, Settled)
            self.settled += 1
            turn += 1

    async def settle_more(self) -> None:
        await self._until("settled", self.settled + FEW)

    async def fail_more(self) -> None:
        await self._until("unanswered", self.unanswered + FEW)

    async def _until(self, counter: str, count: int) -> None:
        async with asyncio.timeout(300):
            while getattr(self, counter) < count:
                assert not any(one.done() for one in self._running)
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._running)


def begin(proxy: Proxy, kind: str) -> None:
    if kind == "reset":
        proxy.reset()
    elif kind == "slow":
        proxy.delay_s = HURRY_S / 2
    else:
        proxy.fall_silent()


def end(proxy: Proxy, kind: str) -> None:
    if kind == "failover":
        proxy.pass_new_connections()
    else:
        proxy.recover()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["silent", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("failover", "reset", "slow"))]
)
async def test_settlements_survive_an_outage(on_postgres: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting_service, "UNAVAILABLE_RETRY_S", 0.01)
    with proxy_of(on_postgres) as (proxy, url), Ledger(url) as ledger:
        books, service = Books(ledger), AccountingService(ledger)
        clients = Clients(service, books)
        await clients.settle_more()
        database: Any = ledger._database
        patient_s, database._timeout_s = database._timeout_s, HURRY_S
        begin(proxy, kind)
        await clients.fail_more()
        end(proxy, kind)
        database._timeout_s = patient_s
        await clients.settle_more()
        await clients.stop()
        await service.close()
    with Ledger(on_postgres) as ledger:
        assert ledger.account_totals(books.account_id).requests == clients.settled
        assert ledger.get_account(books.account_id).balance == 10**12 - clients.settled * COST
        assert ledger.check().ok
