"""Single requests: sums with outcomes and durations, a bounded search, and the makers of keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.accounting import usage
from serve_app.contracts.books import Audit, Outcome
from serve_app.contracts.commands import CreateKey, KeyMakers, RotateKey, SearchRequests, SumRequests
from serve_app.contracts.errors import InvalidValue

from .books import COST, NOON, Books

DAY, HOUR = 86400.0, 3600.0


@pytest.fixture
def used(books: Books) -> Books:
    """Twelve requests, one an hour back from noon; each third failed, and each second is of another model."""
    books.ledger.settle(
        [
            books.settlement(
                f"r{back:02d}",
                started_at=NOON - back * HOUR - 2,
                finished_at=NOON - back * HOUR,
                outcome=Outcome.FAILED if back % 3 == 2 else Outcome.COMPLETED,
                model="svc-coder" if back % 2 else "svc-chat",
            )
            for back in range(12)
        ]
    )
    return books


def found(books: Books, wanted: SearchRequests) -> list[str]:
    """All pages of a search."""
    ids: list[str] = []
    while True:
        page = books.ledger.run(wanted)
        ids += [row.request_id for row in page.rows]
        if page.next is None:
            return ids
        wanted = replace(wanted, after=page.next)


def test_sums_of_single_requests_know_outcomes_and_durations(used: Books) -> None:
    wanted = SumRequests(used.account_id, NOON - DAY, NOON + 1, "outcome", "day")
    rows = {row.outcome: row for row in used.ledger.run(wanted)}
    assert {name: (row.requests, row.failed, row.charged) for name, row in rows.items()} == {
        "completed": (8, 0, 8 * COST),
        "failed": (4, 4, 0),
    }
    assert [row.seconds for row in rows.values()] == pytest.approx([16, 8])
    by_model = used.ledger.run(replace(wanted, by="model"))
    assert [(row.day, row.model, row.requests, row.failed) for row in by_model] == [
        ("2026-06-01", "svc-chat", 6, 2),
        ("2026-06-01", "svc-coder", 6, 2),
    ]
    hours = used.ledger.run(replace(wanted, unit="hour", time_from=NOON - 2 * HOUR))
    assert [(row.day, row.outcome) for row in hours] == [
        ("2026-06-01T10", "failed"),
        ("2026-06-01T11", "completed"),
        ("2026-06-01T12", "completed"),
    ]


def test_a_sum_of_too_many_requests_is_refused(used: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SumRequests(used.account_id, NOON - DAY, NOON + 1)
    monkeypatch.setattr(usage, "MAX_SUMMED", 12)
    assert sum(row.requests for row in used.ledger.run(wanted)) == 12
    monkeypatch.setattr(usage, "MAX_SUMMED", 11)
    with pytest.raises(InvalidValue, match="choose a shorter range"):
        used.ledger.run(wanted)


@pytest.mark.parametrize("limit", [1, 5, 50])
def test_a_search_finds_each_request_once_newest_first(used: Books, limit: int) -> None:
    other = Books(used.ledger, name="Bob")
    used.ledger.settle([other.settlement("theirs"), used.settlement("same", finished_at=NOON)])
    wanted = SearchRequests(used.account_id, limit=limit)
    every = ["same", *(f"r{back:02d}" for back in range(12))]
    assert found(used, wanted) == every
    assert found(used, replace(wanted, time_from=NOON - HOUR, time_to=NOON)) == ["r01"]
    assert found(used, replace(wanted, model="svc-coder")) == [f"r{back:02d}" for back in range(1, 12, 2)]
    assert found(used, replace(wanted, outcome=Outcome.FAILED)) == ["r02", "r05", "r08", "r11"]
    assert found(used, replace(wanted, key_ids=(used.key_id,))) == every
    for keys in ((), (other.key_id,)):
        assert found(used, replace(wanted, key_ids=keys)) == []


def test_a_search_reads_a_bounded_number_of_requests_and_goes_on_from_there(
    used: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_SEARCHED", 2)
    wanted = SearchRequests(used.account_id, outcome=Outcome.FAILED)
    page = used.ledger.run(wanted)
    assert page.rows == ()
    page = used.ledger.run(replace(wanted, after=page.next))
    assert [row.request_id for row in page.rows] == ["r02"]
    assert found(used, wanted) == ["r02", "r05", "r08", "r11"]
    with pytest.raises(InvalidValue):
        used.ledger.run(replace(wanted, after="nowhere"))


def test_the_person_who_created_or_rotated_a_key_is_known(books: Books) -> None:
    create = CreateKey(books.account_id, "laptop", "c" * 64, "sk-…", audit=Audit("ada@example.org"))
    made = books.ledger.run(create)
    rotate = RotateKey(books.account_id, made.key_id, "d" * 64, "sk-…", NOON - 1, Audit("bob@example.org"))
    rotated = books.ledger.run(rotate)
    other = Books(books.ledger, name="Bob").account_id
    books.ledger.run(replace(create, account_id=other, digest="e" * 64))
    makers = books.ledger.run(KeyMakers(books.account_id))
    assert makers == {made.key_id: "ada@example.org", rotated.key_id: "bob@example.org"}
