"""A ledger file with a clock, and a ledger whose settlements can be recorded, held and failed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Outcome, Settled, Settlement, SettlementRejected
from serve_app.contracts.money import Price
from tests.accounting.books import NOON, Books, Ledger


class Book:
    """A ledger file with one account and a clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.now = NOON
        self.ledger = self.open()
        self.account_id = self.ledger.create_account("Ada").account_id
        key = keys.new_key()
        self.key_id = self.ledger.create_key(self.account_id, "main", keys.digest(key), keys.hint(key)).key_id

    def open(self) -> Ledger:
        return Ledger(f"sqlite:///{self.path}", now=lambda: self.now)

    def replies(self) -> int:
        """The number of rows, expired ones included."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM replies").fetchone()
        return int(count)

    def settlement(self, request_id: str, **changed: Any) -> Settlement:
        price = Price(1, 1, 1)
        fixed = (self.account_id, self.key_id, "svc-chat", "stub", price, 3, 0, 2, Outcome.COMPLETED, NOON, NOON)
        return Settlement(request_id, *fixed, **changed)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.01)


class Recorded:
    """Ledger.settle, with a record of the batches, a gate before it, and failures on demand."""

    def __init__(self, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
        self._settle = books.ledger.settle
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Callable[[Sequence[Settlement]], None] = lambda batch: None
        monkeypatch.setattr(books.ledger, "settle", self)

    async def is_entered(self) -> None:
        """Waits until the first batch is at the gate."""
        assert await asyncio.to_thread(self.entered.wait, 60)

    def __call__(self, batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        self.entered.set()
        self.gate.wait(600)
        self.batches.append(len(batch))
        self.fail(batch)
        return self._settle(batch)


async def settled(service: AccountingService, settlement: Settlement) -> Settled:
    (answer,) = await service.settle([settlement])
    assert isinstance(answer, Settled)
    return answer
