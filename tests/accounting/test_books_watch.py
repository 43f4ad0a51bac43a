"""The books are checked without an operator, and what was found is exported."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting.books_watch import BooksWatch
from serve_app.contracts import metrics
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.metric import Metric
from tests.accounting.books import Books, Ledger


class Gauges:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set(self, gauge: Metric, value: float, *labels: str) -> None:
        self.values[gauge.name] = value


def watch(books: Books, gauges: Gauges) -> BooksWatch:
    async def run(command: CheckBooks) -> Any:
        return books.ledger.run(command)

    return BooksWatch(run, gauges, 900.0, wall=lambda: 1234.0)  # type: ignore[arg-type]


async def test_books_that_balance(ledger: Ledger) -> None:
    books, gauges = Books(ledger), Gauges()
    ledger.settle([books.settlement(f"r{number}") for number in range(5)])
    assert await watch(books, gauges).check() == 0
    assert gauges.values == {metrics.BOOKS_DIFFERENCES.name: 0, metrics.BOOKS_CHECKED.name: 1234.0}


async def test_a_difference_is_counted_each_time(ledger: Ledger) -> None:
    books, gauges = Books(ledger), Gauges()
    ledger.settle([books.settlement("r1")])
    with ledger._database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE accounts SET topped_up = topped_up + 1"))
    watched = watch(books, gauges)
    assert await watched.check() > 0
    assert await watched.check() > 0
    assert gauges.values[metrics.BOOKS_DIFFERENCES.name] > 0


async def test_a_ledger_that_is_away_says_nothing_about_the_books(ledger: Ledger) -> None:
    async def away(_: CheckBooks) -> Any:
        return LedgerUnavailable("away")

    gauges = Gauges()
    with pytest.raises(LedgerUnavailable):
        await BooksWatch(away, gauges, 900.0).check()  # type: ignore[arg-type]
    assert not gauges.values
