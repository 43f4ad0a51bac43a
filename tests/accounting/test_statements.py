"""A statement adds up, also when its charges are archived."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.accounting.archive import archive_months
from serve_app.contracts.books import Statement
from serve_app.contracts.commands import ShowStatement
from serve_app.contracts.errors import AccountNotFound, InvalidValue

from .books import COST, NOON, Books, Clock

DAY = 86400.0
JULY, AUGUST = NOON + 30 * DAY, NOON + 61 * DAY


def statement(books: Books, month: str) -> Statement:
    return books.ledger.run(ShowStatement(books.account_id, month))


def used(books: Books, clock: Clock, name: str, at: float) -> None:
    clock.now = at
    books.ledger.settle([books.settlement(name, started_at=at - 1, finished_at=at)])


@pytest.fixture
def year(timed: Books, clock: Clock) -> tuple[Books, Clock]:
    """June to August: money, usage, a correction, and a grant that expires."""
    books = timed
    books.ledger.credit(books.account_id, 1_000_000)
    used(books, clock, "june", NOON + DAY)
    clock.now = JULY
    books.ledger.credit(books.account_id, 5_000, kind="grant", memo="welcome", expires_at=JULY + 5 * DAY)
    books.ledger.correct(books.account_id, -300, memo="booked twice")
    used(books, clock, "july 1", JULY + DAY)
    used(books, clock, "july 2", JULY + 2 * DAY)
    clock.now = JULY + 6 * DAY
    assert books.ledger.expire_grants() == 1
    used(books, clock, "august", AUGUST)
    books.ledger.credit(books.account_id, 77)
    return books, clock


def test_months_follow_each_other_without_a_gap(year: tuple[Books, Clock]) -> None:
    books, _ = year
    june, july, august = (statement(books, f"2026-0{month}") for month in (6, 7, 8))
    assert (june.opening, june.closing) == (0, 1_000_000 - COST)
    assert july.opening == june.closing
    assert [(one.kind, one.amount, one.memo) for one in july.movements] == [
        ("grant", 5_000, "welcome"),
        ("correction", -300, "booked twice"),
        ("expiry", 2 * COST - 5_000, "grant 3"),
    ]
    assert [(row.model, row.requests, row.charged) for row in july.usage] == [("svc-chat", 2, 2 * COST)]
    for month in (june, july, august):
        assert month.closing == (
            month.opening + sum(one.amount for one in month.movements) - sum(row.charged for row in month.usage)
        )
    account = books.ledger.get_account(books.account_id)
    assert august.opening == july.closing
    assert august.closing == account.balance
    assert statement(books, "2026-05").closing == 0
    assert statement(books, "2026-09").opening == account.balance


def test_an_archived_month_has_the_same_statement(year: tuple[Books, Clock], tmp_path: Path) -> None:
    books, clock = year
    before = [statement(books, f"2026-0{month}") for month in (6, 7, 8)]
    clock.now = AUGUST + 20 * DAY
    archive_months(books.ledger._database, "2026-08", tmp_path / "archive", clock.now, print)
    assert [statement(books, f"2026-0{month}") for month in (6, 7, 8)] == before


def test_what_is_no_month_is_refused_and_an_account_that_is_not_there_has_none(timed: Books) -> None:
    for month in ("", "2026", "2026-13", "2026-1", "2026-001", "20xx-01", "2026-06-01", "+026-06"):
        with pytest.raises(InvalidValue):
            statement(timed, month)
    with pytest.raises(AccountNotFound):
        timed.ledger.run(ShowStatement("acct_none", "2026-06"))
