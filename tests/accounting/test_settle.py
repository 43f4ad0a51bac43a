"""A request is billed once, exactly, and never more than the account has."""

from __future__ import annotations

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.contracts.books import Outcome, Refusal, Settled, SettlementRejected, UsageRow
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.money import Price

from .books import COST, NOON, Books, Ledger, start


def rows(url: str, query: str) -> list[Any]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = list(connection.execute(sa.text(query)))
    engine.dispose()
    return found


def test_a_completed_request_is_charged_at_its_prices(books: Books) -> None:
    (settled,) = books.ledger.settle([books.settlement("r1")])
    account = books.account
    assert settled == Settled("r1", charged=COST, balance=10**12 - COST, version=account.version)
    assert account.balance == settled.balance
    assert books.ledger.check().ok


def test_settling_again_changes_nothing_and_returns_the_first_charge(books: Books) -> None:
    books.ledger.settle([books.settlement("r1")])
    books.ledger.credit(books.account_id, 1000)
    before = books.ledger.changes(0)
    (again,) = books.ledger.settle([books.settlement("r1")])
    assert again == Settled("r1", COST, 10**12 - COST + 1000, before.version, duplicate=True)
    assert books.ledger.changes(0) == before


def test_a_repetition_within_a_batch_is_a_duplicate(books: Books) -> None:
    first, other, second = books.ledger.settle([books.settlement(name) for name in ("r1", "r2", "r1")])
    assert [first.duplicate, other.duplicate, second.duplicate] == [False, False, True]
    assert second.charged == COST
    assert first.balance == other.balance == second.balance == books.account.balance == 10**12 - 2 * COST


def test_a_duplicate_with_other_content_is_still_a_duplicate_and_is_noticed(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    books.ledger.settle([books.settlement("r1")])
    with caplog.at_level(logging.WARNING):
        books.ledger.settle([books.settlement("r1")])
        assert not caplog.records
        (again,) = books.ledger.settle([books.settlement("r1", completion_tokens=400)])
        assert "r1" in caplog.text
    assert (again.charged, again.duplicate) == (COST, True)
    caplog.clear()
    books.ledger.settle([books.settlement("r1", price=Price(9, 9, 9))])
    assert "r1" in caplog.text
    assert books.ledger.check().ok


def test_our_failures_and_cancellations_before_any_output_are_recorded_and_free(books: Books, url: str) -> None:
    settled = books.ledger.settle(
        [
            books.settlement("failed", outcome=Outcome.FAILED),
            books.settlement("nothing", outcome=Outcome.CANCELLED, completion_tokens=0),
            books.settlement("partly", outcome=Outcome.CANCELLED, completion_tokens=1),
            books.settlement("empty", completion_tokens=0),
        ]
    )
    assert [one.charged for one in settled] == [0, 0, COST - 3 * 5, COST - 4 * 5]
    assert rows(url, "SELECT count(*) FROM usage") == [(4,)]
    assert rows(url, "SELECT request_id FROM usage WHERE entry_id IS NULL ORDER BY 1") == [("failed",), ("nothing",)]
    assert books.ledger.check().ok


def test_grants_are_spent_before_top_ups(ledger: Ledger) -> None:
    books = Books(ledger, top_up=100)
    ledger.credit(books.account_id, COST + 6, "grant")
    ledger.settle([books.settlement("r1")])
    assert (books.account.granted, books.account.topped_up) == (6, 100)
    ledger.settle([books.settlement("r2")])
    assert (books.account.granted, books.account.topped_up) == (0, 60)


def test_a_balance_stops_at_zero_and_the_rest_is_recorded_as_a_loss(ledger: Ledger, url: str) -> None:
    books = Books(ledger, top_up=60)
    first, second, third = ledger.settle([books.settlement(name) for name in ("r1", "r2", "r3")])
    assert [first.charged, second.charged, third.charged] == [COST, 60 - COST, 0]
    assert books.account.balance == 0
    assert rows(url, "SELECT uncollected FROM usage ORDER BY request_id") == [(0,), (2 * COST - 60,), (COST,)]
    posted = dict(rows(url, "SELECT ledger_account, sum(amount) FROM postings GROUP BY 1"))
    assert {name: int(total) for name, total in posted.items()} == {
        f"customer:{books.account_id}:topped_up": 0,
        "funds:received": -60,
        "revenue:svc-chat": 3 * COST,
        "loss:uncollected": -(3 * COST - 60),
    }
    assert ledger.check().ok


BAD: list[dict[str, Any]] = [
    {"prompt_tokens": -1},
    {"completion_tokens": -1},
    {"cached_tokens": 11},
    {"completion_tokens": 2**40},
    {"completion_tokens": 1.5},
    {"model": "a\0b"},
    {"backend": "\ud800"},
    {"request_id": ""},
    {"outcome": "completed "},
    {"price": Price(-1, 0, 0)},
    {"price": Price(10**15, 10**15, 10**15)},
    {"finished_at": float("nan")},
    {"finished_at": 1e300},
]


def test_a_bad_settlement_does_not_disturb_its_batch(books: Books) -> None:
    other = books.new_key(books.ledger.create_account("B").account_id)
    batch = [
        *(books.settlement(**{"request_id": f"bad{number}"} | wrong) for number, wrong in enumerate(BAD)),
        books.settlement("good1"),
        books.settlement("bad account", account_id="acct_none"),
        books.settlement("bad key", key_id=other.key_id),
        books.settlement("good2"),
    ]
    results = books.ledger.settle(batch)
    refused = [one.refusal for one in results if isinstance(one, SettlementRejected)]
    assert refused == [*[Refusal.INVALID] * len(BAD), Refusal.ACCOUNT_NOT_FOUND, Refusal.KEY_NOT_FOUND]
    assert [one.request_id for one in results if isinstance(one, Settled)] == ["good1", "good2"]
    assert books.account.balance == 10**12 - 2 * COST
    assert books.ledger.account_totals(books.account_id).requests == 2
    assert books.ledger.check().ok


def test_a_request_id_of_another_account_is_refused_and_reveals_nothing(books: Books) -> None:
    other = Books(books.ledger, name="B")
    books.ledger.settle([books.settlement("r1")])
    (result,) = books.ledger.settle([other.settlement("r1", completion_tokens=400)])
    assert isinstance(result, SettlementRejected)
    assert result.refusal is Refusal.REQUEST_OF_ANOTHER_ACCOUNT
    assert other.account.balance == 10**12


def test_requests_that_ran_when_the_key_and_the_account_were_stopped_are_still_billed(books: Books) -> None:
    books.ledger.revoke_key(books.key_id)
    books.ledger.set_active(books.account_id, False)
    assert isinstance(books.ledger.settle([books.settlement("r1")])[0], Settled)


def test_each_usage_row_names_the_price_it_was_billed_at(books: Books, url: str) -> None:
    books.ledger.settle([books.settlement("r1"), books.settlement("r2", price=Price(1, 1, 1))])
    books.ledger.settle([books.settlement("r3"), books.settlement("r4", model="svc-coder")])
    found = rows(url, "SELECT u.request_id, p.output FROM usage u JOIN price_versions p ON p.id = u.price_version")
    assert dict(found) == {"r1": 5, "r2": 1, "r3": 5, "r4": 5}
    assert rows(url, "SELECT count(*) FROM price_versions") == [(3,)]


def test_usage_is_grouped_and_filtered_by_the_utc_day_of_the_end(books: Books) -> None:
    second = books.new_key()
    day = 86_400
    midnight = NOON - day / 2  # 2026-06-01 00:00:00 UTC
    books.ledger.settle(
        [
            books.settlement("r1", finished_at=midnight - 0.001),
            books.settlement("r2", started_at=midnight - 5, finished_at=midnight),
            books.settlement("r3", key_id=second.key_id),
            books.settlement("r4", model="svc-coder", finished_at=NOON + day),
        ]
    )
    usage = books.ledger.usage
    one = {"requests": 1, "prompt_tokens": 10, "cached_tokens": 2, "completion_tokens": 4, "charged": COST}
    two = {name: 2 * count for name, count in one.items()}
    assert usage(group_by=["day"]) == [
        UsageRow(**one, day="2026-05-31"),
        UsageRow(**two, day="2026-06-01"),
        UsageRow(**one, day="2026-06-02"),
    ]
    assert usage(day_from="2026-06-01", day_to="2026-06-01") == [UsageRow(**two)]
    assert usage(key_id=second.key_id, group_by=["key"]) == [UsageRow(**one, key_id=second.key_id)]
    assert usage(model="svc-coder", group_by=["account", "model"]) == [
        UsageRow(**one, account_id=books.account_id, model="svc-coder")
    ]
    assert usage(account_id="acct_none") == []
    assert books.ledger.account_totals(books.account_id).requests == 4
    with pytest.raises(InvalidValue, match="YYYY-MM-DD"):
        usage(day_from="1.6.2026")
    with pytest.raises(InvalidValue, match="hour"):
        usage(group_by=["hour"])  # type: ignore[list-item]


def test_writers_that_settle_the_same_ids_bill_each_once(books: Books, url: str) -> None:
    """Each of them has its own connections, as a process has."""

    def hammer(seed: int) -> list[Settled]:
        ids = [f"r{number}" for number in range(60)]
        random.Random(seed).shuffle(ids)
        batches = [ids[start : start + 7] for start in range(0, 60, 7)]
        with Ledger(url) as mine:
            return [one for batch in batches for one in mine.settle([books.settlement(name) for name in batch])]

    with ThreadPoolExecutor(6) as pool:
        results = [one for answers in pool.map(hammer, range(6)) for one in answers]
    assert {one.charged for one in results} == {COST}
    assert sum(not one.duplicate for one in results) == 60
    assert books.account.balance == 10**12 - 60 * COST
    # Each version has one balance: a reader with the higher version has the newer balance.
    by_version = {one.version: one.balance for one in results}
    assert all(by_version[one.version] == one.balance for one in results)
    assert [by_version[version] for version in sorted(by_version)] == sorted(by_version.values(), reverse=True)
    assert books.ledger.check().ok


@pytest.mark.slow
def test_a_killed_process_loses_nothing_it_has_acknowledged(books: Books, url: str) -> None:
    """Spend that waits in memory would be lost. Here a settlement returns only after it is written."""
    batch = 8
    process = start("settle", url, books.account_id, books.key_id, "r", "100000", str(batch))
    assert process.stdout is not None
    acknowledged = [name for _ in range(20) for name in process.stdout.readline().split()]
    process.kill()
    acknowledged += process.stdout.read().split()
    process.wait()

    with Ledger(url) as reopened:
        assert reopened.check().ok
        recorded = {name for (name,) in rows(url, "SELECT request_id FROM usage")}
        assert set(acknowledged) <= recorded
        assert len(recorded) - len(acknowledged) <= batch  # at most the batch that was not acknowledged
        assert len(recorded) % batch == 0
        assert reopened.get_account(books.account_id).balance == 10**12 - len(recorded) * COST
        again = reopened.settle([books.settlement(name) for name in acknowledged[:100]])
        assert all(one.duplicate for one in again if isinstance(one, Settled))
        assert reopened.get_account(books.account_id).balance == 10**12 - len(recorded) * COST
