"""The accounting process tidies its ledger in the background, and any number of them may share one."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.gateway.accounting import OPERATIONS, AccountingService
from serve_app.ledger import Ledger, LedgerUnavailable, Outcome, Price, Settled, Settlement, StoredReply, keys

HOUR = 3600.0
NOON = 1_780_315_200.0


class Book:
    """A ledger file with one account and a clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.now = NOON
        self.ledger = self.open()
        self.account_id = self.ledger.create_account("Ada").account_id
        key = keys.new_key()
        self.key_id = self.ledger.create_key(self.account_id, "main", keys.digest(key, "s"), keys.hint(key)).key_id

    def open(self) -> Ledger:
        return Ledger(f"sqlite:///{self.path}", now=lambda: self.now)

    def replies(self) -> int:
        """Rows, whether anybody may still see them or not."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM replies").fetchone()
        return int(count)

    def settlement(self, request_id: str, **changed: Any) -> Settlement:
        price = Price(1, 1, 1)
        fixed = (self.account_id, self.key_id, "svc-chat", "stub", price, 3, 0, 2, Outcome.COMPLETED, NOON, NOON)
        return Settlement(request_id, *fixed, **changed)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.01)


async def test_expired_grants_and_old_replies_leave_by_themselves(book: Book) -> None:
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
    assert report.entries == 5  # two grants, two charges, and one expiry, whoever came first


async def test_a_ledger_that_is_away_is_tidied_when_it_is_back(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Semaphore(0)
    away = threading.Event()
    away.set()
    real = book.ledger.expire_grants

    def expire_grants() -> int:
        tried.release()
        if away.is_set():
            raise LedgerUnavailable("connection refused")
        return real()

    monkeypatch.setattr(book.ledger, "expire_grants", expire_grants)
    monkeypatch.setattr(book.ledger, "prune_replies", lambda: 1 // 0)  # nor does a fault of ours end it
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
    async with asyncio.timeout(10):
        await service.close()


async def test_every_operation_that_is_offered_is_one_of_the_ledger(book: Book) -> None:
    assert all(callable(getattr(Ledger, name)) for name in OPERATIONS)
    service = AccountingService(book.ledger)
    for wrong in ("settle", "close", "__init__", "_database"):
        with pytest.raises(ValueError, match="no such operation"):
            await service.call(wrong, {})
    (grant,) = await _granted(service, book)
    assert grant.left == 5
    await service.close()


async def _granted(service: AccountingService, book: Book) -> Any:
    await service.call("credit", {"account_id": book.account_id, "amount_nano": 5, "kind": "grant"})
    return await service.call("grants", {"account_id": book.account_id})
