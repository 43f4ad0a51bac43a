"""The accounting process tidies its ledger in the background and counts what it sees."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts import metrics
from serve_app.contracts.books import Settled, StoredReply
from serve_app.contracts.commands import (
    ExpireGrants,
    PruneReplies,
)
from serve_app.contracts.errors import LedgerUnavailable
from tests.accounting.accounting_service.settling import Book, until
from tests.accounting.books import NOON

HOUR = 3600.0


async def test_expired_grants_and_old_replies_are_removed_without_a_request(book: Book) -> None:
    book.ledger.credit(book.account_id, 100, "grant", expires_at=NOON + HOUR)
    book.ledger.credit(book.account_id, 7, "grant")
    book.ledger.settle([book.settlement("r1", reply=StoredReply("retry", "f", b"{}"))])
    services = [AccountingService(book.open(), tidy_every_s=0.02) for _ in range(3)]
    for service in services:
        service.start()
    book.now += 25 * HOUR
    await until(lambda: book.ledger.get_account(book.account_id).balance == 7)
    await until(lambda: book.replies() == 0)
    (settled,) = await services[0].settle([book.settlement("r2")])
    assert isinstance(settled, Settled)
    assert settled.balance == 2
    for service in services:
        await service.close()
    report = book.ledger.check()
    assert report.ok
    assert report.entries == 5  # two grants, two charges, and one expiry, in any order


async def test_the_cleanup_runs_again_after_an_outage_of_the_ledger(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Semaphore(0)
    away = threading.Event()
    away.set()
    real = book.ledger.run

    def run(command: Any) -> Any:
        if isinstance(command, PruneReplies):
            return 1 // 0  # a programming error does not stop the cleanup either
        if isinstance(command, ExpireGrants):
            tried.release()
            if away.is_set():
                raise LedgerUnavailable("connection refused")
        return real(command)

    monkeypatch.setattr(book.ledger, "run", run)
    book.ledger.credit(book.account_id, 100, "grant", expires_at=NOON + HOUR)
    book.now += 3 * HOUR
    service = AccountingService(book.ledger, tidy_every_s=0.01)
    service.start()
    for _ in range(3):
        assert await asyncio.to_thread(tried.acquire, timeout=30)
    assert book.ledger.get_account(book.account_id).balance == 100
    away.clear()
    await until(lambda: book.ledger.get_account(book.account_id).balance == 0)
    await service.close()


async def test_a_service_that_was_never_started_closes_at_once(book: Book) -> None:
    service = AccountingService(book.ledger)
    async with asyncio.timeout(30):
        await service.close()


async def test_what_no_balance_covered_is_counted_once(book: Book) -> None:
    counted: list[tuple[Any, ...]] = []
    lags: list[float] = []
    exported = SimpleNamespace(
        add=lambda *added: counted.append(added), observe=lambda _, seconds: lags.append(seconds)
    )
    service = AccountingService(book.ledger, metrics=exported, wall=lambda: NOON + 3.0)  # type: ignore[arg-type]
    book.ledger.credit(book.account_id, 8)
    await service.settle([book.settlement("r1")])
    assert counted == [(metrics.REVENUE, 5e-9, "svc-chat")]
    await service.settle([book.settlement("r2"), book.settlement("r3")])
    await service.settle([book.settlement("r2"), book.settlement("r3"), book.settlement("r1")])
    assert [one for one in counted if one[0] is metrics.UNCOLLECTED] == [
        (metrics.UNCOLLECTED, 2e-9),
        (metrics.UNCOLLECTED, 5e-9),
    ]
    assert sum(one[1] for one in counted if one[0] is metrics.REVENUE) == pytest.approx(8e-9)
    assert lags == [3.0] * 3
    await service.close()
