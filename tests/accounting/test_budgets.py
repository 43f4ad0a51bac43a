"""A key has its own models, limits, budget and expiry, and each settlement counts what it has spent."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.books import Outcome, Settled
from serve_app.contracts.errors import InvalidValue, KeyNotFound

from .books import COST, NOON, Books, Clock, Ledger

DAY = 86_400.0
MIDNIGHT = NOON + DAY / 2  # 2026-06-02 00:00:00 UTC


@pytest.fixture
def funded(timed: Books) -> Books:
    timed.ledger.credit(timed.account_id, 10**9)
    return timed


def settle(books: Books, request_id: str, **changed: Any) -> Settled:
    (settled,) = books.ledger.settle([books.settlement(request_id, **changed)])
    assert isinstance(settled, Settled)
    return settled


def test_a_key_is_created_with_limits_of_its_own(timed: Books) -> None:
    key = timed.new_key(
        models=["svc-chat", "svc-chat"],
        rpm=10,
        tpm=1000,
        concurrency=2,
        budget=500,
        budget_period="month",
        expires_at=NOON + DAY,
    )
    assert (key.models, key.limits) == (("svc-chat",), {"rpm": 10, "tpm": 1000, "concurrency": 2})
    assert (key.budget, key.budget_period, key.spent, key.spent_period) == (500, "month", 0, "2026-06")
    assert key.expires_at == NOON + DAY
    assert timed.key(key.key_id) == key
    assert timed.ledger.find_key(key.digest) == (key, timed.account)
    plain = timed.key()
    assert (plain.models, plain.limits, plain.budget, plain.spent_period, plain.expires_at) == (
        None,
        {},
        None,
        "",
        None,
    )


def test_a_limit_of_a_key_is_set_taken_away_or_left_alone(timed: Books) -> None:
    update = timed.ledger.update_key
    key = update(timed.key_id, name="laptop", models=("a", "b"), rpm=5, expires_at=NOON + 1)
    assert (key.name, key.models, key.limits["rpm"], key.expires_at) == ("laptop", ("a", "b"), 5, NOON + 1)
    key = update(timed.key_id, models=None, tpm=7, concurrency=1, expires_at=None)
    assert (key.models, key.limits, key.expires_at) == (None, {"rpm": 5, "tpm": 7, "concurrency": 1}, None)
    assert update(timed.key_id, name="laptop", rpm=5, models=None) == key  # no change, no version
    assert timed.ledger.changes(key.version - 1).keys == (key,)
    with pytest.raises(KeyNotFound):
        update("key_none", rpm=1)


def test_an_expired_key_can_be_changed_and_extended(timed: Books, clock: Clock) -> None:
    key = timed.new_key(expires_at=NOON + 60)
    clock.now += 120
    assert timed.ledger.update_key(key.key_id, name="old", expires_at=NOON + 60).expires_at == NOON + 60
    assert timed.ledger.update_key(key.key_id, expires_at=NOON + 180).expires_at == NOON + 180


WRONG: list[dict[str, Any]] = [
    {"name": ""},
    {"models": []},
    {"models": "svc-chat"},
    {"models": ["a\nb"]},
    {"models": [f"m{number}" for number in range(101)]},
    {"rpm": 0},
    {"tpm": 1.5},
    {"concurrency": -1},
    {"budget": 5},
    {"budget_period": "day"},
    {"budget": 0, "budget_period": "day"},
    {"budget": 5.0, "budget_period": "day"},
    {"budget": 10**30, "budget_period": "day"},
    {"budget": 5, "budget_period": "week"},
    {"budget": None, "budget_period": "day"},
    {"expires_at": NOON},
    {"expires_at": "tomorrow"},
    {"expires_at": float("inf")},
]


def test_a_limit_that_makes_no_sense_is_refused_and_changes_nothing(timed: Books) -> None:
    before = timed.ledger.changes(0)
    for wrong in WRONG:
        with pytest.raises(InvalidValue):
            timed.ledger.update_key(timed.key_id, **wrong)
        if "name" not in wrong:
            with pytest.raises(InvalidValue):
                timed.new_key(**wrong)
    assert timed.ledger.changes(0) == before


def test_each_settlement_of_a_key_with_a_budget_returns_what_the_key_has_spent(funded: Books) -> None:
    key = funded.new_key(budget=10**6, budget_period="day")
    batch = [funded.settlement(name, key_id=key.key_id) for name in ("r1", "r2", "r1")]
    results = funded.ledger.settle([*batch, funded.settlement("r3")])
    told = [(one.key_spent, one.key_period) for one in results if isinstance(one, Settled)]
    assert told == [(2 * COST, "2026-06-01")] * 3 + [(None, None)]  # as of the whole batch
    again = settle(funded, "r2", key_id=key.key_id)
    assert (again.duplicate, again.key_spent) == (True, 2 * COST)
    now = funded.key(key.key_id)
    assert (now.spent, now.spent_period) == (2 * COST, "2026-06-01")
    assert now.spent_version == funded.account.version == again.version
    assert funded.ledger.check().ok


def test_what_a_key_has_spent_comes_with_the_feed(funded: Books) -> None:
    key = funded.new_key(budget=10**6, budget_period="day")
    plain = funded.key()
    since = funded.ledger.changes(0).version
    settle(funded, "r1", key_id=key.key_id)
    settle(funded, "r2")
    changes = funded.ledger.changes(since)
    assert [(one.key_id, one.spent) for one in changes.keys] == [(key.key_id, COST)]
    assert funded.key().version == plain.version  # a key without a budget is left alone
    account_version = changes.accounts[0].version
    assert changes.keys[0].spent_version == account_version


def test_only_what_was_charged_counts(timed: Books) -> None:
    timed.ledger.credit(timed.account_id, COST + 10)
    key = timed.new_key(budget=10**6, budget_period="day")
    for name in ("r1", "r2", "r3"):
        settle(timed, name, key_id=key.key_id)
    assert timed.key(key.key_id).spent == COST + 10
    assert settle(timed, "failed", key_id=key.key_id, outcome=Outcome.FAILED).key_spent == COST + 10
    assert timed.ledger.check().ok


def test_a_budget_begins_anew_at_midnight_utc_or_with_the_month(funded: Books, clock: Clock) -> None:
    daily = funded.new_key(budget=10**6, budget_period="day")
    monthly = funded.new_key(budget=10**6, budget_period="month")
    for key in (daily, monthly):
        settle(funded, f"{key.key_id} noon", key_id=key.key_id)
    clock.now = MIDNIGHT - 0.001
    assert funded.key(daily.key_id).spent == COST
    clock.now = MIDNIGHT
    assert (funded.key(daily.key_id).spent, funded.key(daily.key_id).spent_period) == (0, "2026-06-02")
    assert funded.key(monthly.key_id).spent == COST
    told = settle(funded, "first", key_id=daily.key_id, finished_at=MIDNIGHT)
    assert (told.key_spent, told.key_period) == (COST, "2026-06-02")
    clock.now = MIDNIGHT + 29 * DAY  # 2026-07-01
    assert (funded.key(monthly.key_id).spent, funded.key(monthly.key_id).spent_period) == (0, "2026-07")
    assert funded.ledger.check().ok


def test_a_settlement_that_comes_late_counts_in_the_period_of_its_request(funded: Books, clock: Clock) -> None:
    key = funded.new_key(budget=10**6, budget_period="day")
    clock.now = MIDNIGHT + 60
    told = settle(funded, "late", key_id=key.key_id, finished_at=MIDNIGHT - 1)
    assert (told.key_spent, told.key_period) == (0, "2026-06-02")
    clock.now = MIDNIGHT - 60  # a clock that is set back
    assert funded.key(key.key_id).spent == COST
    assert funded.ledger.check().ok


def test_a_budget_that_is_set_later_counts_what_was_spent_before(funded: Books, clock: Clock) -> None:
    settle(funded, "yesterday", finished_at=NOON - DAY)
    settle(funded, "today")
    settle(funded, "ahead", finished_at=NOON + DAY)
    assert funded.ledger.update_key(funded.key_id, budget=10**6, budget_period="day").spent == COST
    settle(funded, "more", finished_at=NOON - DAY)  # of a day without a counter
    assert funded.ledger.check().ok
    settle(funded, "today too")
    assert funded.ledger.update_key(funded.key_id, budget_period="month").spent == 3 * COST
    settle(funded, "again")
    assert funded.ledger.update_key(funded.key_id, budget_period="day").spent == 3 * COST
    assert funded.ledger.check().ok
    key = funded.ledger.update_key(funded.key_id, budget=None)
    assert (key.budget, key.budget_period, key.spent, key.spent_period) == (None, None, 0, "")
    settle(funded, "free of it")
    assert funded.ledger.update_key(funded.key_id, budget=1, budget_period="day").spent == 4 * COST
    assert funded.ledger.check().ok


def test_the_amount_of_a_budget_changes_without_forgetting_what_was_spent(funded: Books) -> None:
    funded.ledger.update_key(funded.key_id, budget=10**6, budget_period="day")
    settle(funded, "r1")
    key = funded.ledger.update_key(funded.key_id, budget=5)
    assert (key.budget, key.budget_period, key.spent) == (5, "day", COST)


def test_the_keys_of_a_feed_and_of_a_list_are_the_same(funded: Books, url: str, clock: Clock) -> None:
    keys = [funded.new_key(budget=10 + number, budget_period="day") for number in range(3)]
    for key in keys:
        settle(funded, key.key_id, key_id=key.key_id)
    with Ledger(url, now=clock) as other:
        listed = other.list_keys(funded.account_id)
        assert sorted(other.changes(0).keys, key=lambda one: one.version) == sorted(listed, key=lambda one: one.version)
        for key in listed:
            assert other.find_key(key.digest) == (key, funded.account)
