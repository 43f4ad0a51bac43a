"""The export has one record per request, in a stable order, and sums to what the aggregates say."""

from __future__ import annotations

import pytest

from serve_app.contracts.books import Outcome, UsageRecord
from serve_app.contracts.errors import InvalidValue

from .books import COST, NOON, PRICE, Books, Clock, Ledger

DAY = 86_400.0


def everything(ledger: Ledger, limit: int, **wanted: object) -> list[UsageRecord]:
    found: list[UsageRecord] = []
    after = None
    while True:
        page = ledger.export_usage(after=after, limit=limit, **wanted)  # type: ignore[arg-type]
        assert len(page.rows) <= limit
        found += page.rows
        if page.next is None:
            return found
        assert len(page.rows) == limit
        after = page.next


def test_a_record_says_what_was_used_when_and_for_how_much(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 40)
    timed.ledger.settle([timed.settlement("r1", finished_at=NOON + 0.125)])
    page = timed.ledger.export_usage()
    assert page.next is None
    assert page.rows == (
        UsageRecord(
            request_id="r1",
            account_id=timed.account_id,
            key_id=timed.key_id,
            model="svc-chat",
            backend="smollm2",
            price=PRICE,
            prompt_tokens=10,
            cached_tokens=2,
            completion_tokens=4,
            charged=40,
            uncollected=COST - 40,
            outcome=Outcome.COMPLETED,
            started_at=NOON - 1,
            finished_at=NOON + 0.125,
            settled_at=NOON,
        ),
    )


@pytest.fixture
def used(books: Books) -> tuple[Books, Books]:
    """Two accounts with 40 requests each over four days, several of them at the same time."""
    other = Books(books.ledger, name="B")
    for one in (books, other):
        second = one.new_key().key_id
        books.ledger.settle(
            [
                one.settlement(
                    f"{one.account_id} {number:02}",
                    key_id=second if number % 3 else one.key_id,
                    model="svc-coder" if number % 5 else "svc-chat",
                    finished_at=NOON + (number // 4 * 4) * DAY / 10,
                    completion_tokens=number,
                )
                for number in reversed(range(40))
            ]
        )
    return books, other


def test_pages_of_any_size_give_each_request_once_in_the_same_order(used: tuple[Books, Books]) -> None:
    ledger = used[0].ledger
    once = everything(ledger, 1000)
    assert len({one.request_id for one in once}) == len(once) == 80
    for size in (1, 7, 40, 80):
        assert everything(ledger, size) == once
    for one in used:
        mine = [record for record in once if record.account_id == one.account_id]
        assert [record.request_id for record in mine] == sorted(record.request_id for record in mine)
        assert everything(ledger, 9, account_id=one.account_id) == mine


def test_the_export_of_a_period_sums_to_the_aggregates_of_its_days(used: tuple[Books, Books]) -> None:
    ledger = used[0].ledger
    midnight = NOON - DAY / 2
    for day, (row,) in {
        day: ledger.usage(day_from=f"2026-06-0{1 + day}", day_to=f"2026-06-0{1 + day}") for day in range(4)
    }.items():
        records = everything(ledger, 11, time_from=midnight + day * DAY, time_to=midnight + (day + 1) * DAY)
        assert len(records) == row.requests
        assert sum(one.charged for one in records) == row.charged
        assert sum(one.completion_tokens for one in records) == row.completion_tokens


def test_the_start_of_a_period_is_in_it_and_the_end_is_not(timed: Books) -> None:
    timed.ledger.settle([timed.settlement(f"r{number}", finished_at=NOON + number) for number in range(4)])
    page = timed.ledger.export_usage(time_from=NOON + 1, time_to=NOON + 3)
    assert [one.request_id for one in page.rows] == ["r1", "r2"]


def test_the_export_is_filtered_by_key_and_model(used: tuple[Books, Books]) -> None:
    ledger, books = used[0].ledger, used[0]
    by_key = everything(ledger, 3, key_id=books.key_id)
    assert {one.key_id for one in by_key} == {books.key_id}
    assert len(by_key) == 14
    both = everything(ledger, 3, account_id=books.account_id, model="svc-chat")
    assert {one.model for one in both} == {"svc-chat"}
    assert len(both) == 8
    assert everything(ledger, 3, key_id="key_none") == []


def test_requests_that_settle_during_an_export_do_not_change_earlier_rows(used: tuple[Books, Books]) -> None:
    books = used[0]
    first = books.ledger.export_usage(account_id=books.account_id, limit=20)
    books.ledger.settle([books.settlement("early", finished_at=NOON - 5), books.settlement("late", finished_at=2e9)])
    rest = books.ledger.export_usage(account_id=books.account_id, after=first.next)
    assert len({one.request_id for one in (*first.rows, *rest.rows)}) == 41
    assert rest.rows[-1].request_id == "late"


def test_a_place_that_no_page_gave_is_refused(used: tuple[Books, Books]) -> None:
    for wrong in ("", "x", "W10=", "WzEsMiwzXQ==", "a\0b", "é", '["a",1,"b"]'):
        with pytest.raises(InvalidValue, match="next"):
            used[0].ledger.export_usage(after=wrong)
    for limit in (0, 1001):
        with pytest.raises(InvalidValue, match="limit"):
            used[0].ledger.export_usage(limit=limit)
