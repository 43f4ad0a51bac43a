"""Requests of all accounts are listed newest first, each once, with filters and in pages."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.accounting import recent_requests
from serve_app.contracts.books import Outcome
from serve_app.contracts.commands import ListRecent
from serve_app.contracts.errors import InvalidValue

from .books import NOON, Books, Ledger

HOUR = 3600.0


@pytest.fixture
def two(ledger: Ledger) -> tuple[Books, Books]:
    """Two accounts with twelve requests, one every seven hours in turn: three and a half days."""
    books = Books(ledger), Books(ledger, name="Ben")
    outcomes = (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.FAILED)
    ledger.settle(
        [
            books[number % 2].settlement(
                f"r{number:02}", finished_at=NOON + 7 * HOUR * number, outcome=outcomes[number % 3],
                model="svc-chat" if number < 6 else "svc-coder",
            )
            for number in range(12)
        ]
    )  # fmt: skip
    return books


def ids(ledger: Ledger, limit: int = 100, **filters: Any) -> list[str]:
    """Follows all pages."""
    found: list[str] = []
    after = None
    for _ in range(100):
        page = ledger.run(ListRecent(**filters, after=after, limit=limit))
        assert len(page.rows) <= limit
        found += [row.request_id for row in page.rows]
        after = page.next
        if after is None:
            return found
    raise AssertionError("the pages have no end")


def numbered(*numbers: int) -> list[str]:
    return [f"r{number:02}" for number in numbers]


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 100])
def test_pages_have_each_request_once_newest_first(
    ledger: Ledger, two: tuple[Books, Books], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ids(ledger, limit) == numbered(*range(11, -1, -1))
    monkeypatch.setattr(recent_requests, "MAX_DAYS", 1)
    assert ids(ledger, limit) == numbered(*range(11, -1, -1))


def test_requests_that_ended_at_the_same_time_are_on_one_page_each(ledger: Ledger) -> None:
    books = Books(ledger)
    ledger.settle([books.settlement(f"r{number:02}") for number in range(5)])
    assert ids(ledger, 2) == numbered(4, 3, 2, 1, 0)


def test_each_filter_keeps_only_its_requests(ledger: Ledger, two: tuple[Books, Books]) -> None:
    ada, ben = two
    assert ids(ledger, account_id=ben.account_id) == numbered(11, 9, 7, 5, 3, 1)
    assert ids(ledger, key_id=ada.key_id, limit=2) == numbered(10, 8, 6, 4, 2, 0)
    assert ids(ledger, model="svc-chat") == numbered(5, 4, 3, 2, 1, 0)
    assert ids(ledger, outcome=Outcome.FAILED, limit=1) == numbered(11, 8, 5, 2)
    assert ids(ledger, time_from=NOON + 7 * HOUR * 3, time_to=NOON + 7 * HOUR * 5) == numbered(4, 3)
    assert ids(ledger, account_id=ada.account_id, model="svc-coder", outcome=Outcome.COMPLETED) == numbered(6)
    ledger.update_key(ben.key_id, tags=["ci"])
    assert ids(ledger, tag="ci") == numbered(11, 9, 7, 5, 3, 1)
    assert ids(ledger, tag="") == numbered(10, 8, 6, 4, 2, 0)
    assert ids(ledger, account_id="acct_\0") == []


@pytest.mark.parametrize("after", ["", "x", "1~a\0b", "nan~r", "inf~r", "-1~r", "1e300~r", "12"])
def test_a_cursor_that_no_page_gave_is_refused(ledger: Ledger, after: str) -> None:
    with pytest.raises(InvalidValue, match="after"):
        ledger.run(ListRecent(after=after))


@pytest.mark.parametrize("fields", [{"limit": 0}, {"time_from": -1.0}, {"time_to": 1e300}])
def test_values_out_of_range_are_refused(ledger: Ledger, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        ledger.run(ListRecent(**fields))
