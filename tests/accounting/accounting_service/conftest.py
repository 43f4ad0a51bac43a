"""The accounting process on a fresh ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.accounting.accounting_service import AccountingService
from tests.accounting.accounting_service.settling import Book, Recorded
from tests.accounting.books import Books


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


@pytest.fixture
def recorded(books: Books, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(books, monkeypatch)


@pytest.fixture
async def service(books: Books) -> AsyncIterator[AccountingService]:
    opened = AccountingService(books.ledger)
    yield opened
    await opened.close()
