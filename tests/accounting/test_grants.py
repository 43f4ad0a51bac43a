"""Grants are spent before top-ups, soonest expiry first, and an expired grant leaves the books balanced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.accounting.funds import GRACE_S
from serve_app.accounting.grants import Lot, payable, spend
from serve_app.contracts.books import GrantSnapshot, Settled
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue

from .books import COST, NOON, Books, Clock, Ledger

HOUR = 3600.0
DAY = 24 * HOUR


def left(books: Books) -> list[int]:
    return [grant.left for grant in books.ledger.grants(books.account_id)]


def settle(books: Books, request_id: str, **changed: Any) -> Settled:
    (settled,) = books.ledger.settle([books.settlement(request_id, **changed)])
    assert isinstance(settled, Settled)
    return settled


def test_a_grant_is_listed_with_what_is_left_of_it(timed: Books, clock: Clock) -> None:
    assert timed.ledger.grants(timed.account_id) == []
    timed.ledger.credit(timed.account_id, 100, "grant", memo="welcome", expires_at=NOON + DAY)
    clock.now += 5
    timed.ledger.credit(timed.account_id, 7, "grant")
    timed.ledger.credit(timed.account_id, 1000)
    settle(timed, "r1")
    first, second = timed.ledger.grants(timed.account_id)
    assert first == GrantSnapshot(first.grant_id, 100, 100 - COST, NOON, NOON + DAY, "welcome")
    assert second == GrantSnapshot(second.grant_id, 7, 7, NOON + 5, None, "")
    with pytest.raises(AccountNotFound):
        timed.ledger.grants("acct_none")


def test_the_soonest_expiring_grant_is_spent_first_then_lasting_ones_then_top_ups(timed: Books) -> None:
    timed.ledger.credit(timed.account_id, 60)
    timed.ledger.credit(timed.account_id, 50, "grant")
    timed.ledger.credit(timed.account_id, 50, "grant", expires_at=NOON + 2 * DAY)
    timed.ledger.credit(timed.account_id, 50, "grant", expires_at=NOON + DAY)
    steps = []
    for number in range(5):
        settle(timed, f"r{number}")
        steps.append((*left(timed), timed.account.topped_up))
    assert steps == [
        (50, 50, 50 - COST, 60),
        (50, 100 - 2 * COST, 0, 60),
        (150 - 3 * COST, 0, 0, 60),
        (0, 0, 0, 210 - 4 * COST),
        (0, 0, 0, 0),  # the rest of the last request is a loss
    ]
    assert timed.ledger.check().ok


def test_an_account_shows_what_of_its_balance_expires_when(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 10)
    timed.ledger.credit(timed.account_id, 30, "grant", expires_at=NOON + 2 * DAY)
    timed.ledger.credit(timed.account_id, 20, "grant", expires_at=NOON + DAY)
    account = timed.ledger.credit(timed.account_id, 5, "grant")
    assert account.expiring == ((NOON + DAY, 20), (NOON + 2 * DAY, 30))
    assert account.balance == 65
    assert [account.available(NOON + at) for at in (0, DAY - 0.001, DAY, 2 * DAY)] == [65, 65, 45, 15]
    assert timed.account == account
    assert timed.ledger.list_accounts() == [account]
    assert timed.ledger.changes(0).accounts == (account,)
    found = timed.ledger.find_key(timed.key().digest)
    assert found is not None
    assert found[1] == account


def test_a_request_that_began_before_the_expiry_is_paid_from_the_grant(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 2 * COST, "grant", expires_at=NOON + HOUR)
    timed.ledger.credit(timed.account_id, 1000)
    clock.now = NOON + HOUR + 60
    settle(timed, "before", started_at=NOON + HOUR - 1, finished_at=NOON + HOUR + 59)
    assert (left(timed), timed.account.topped_up) == ([COST], 1000)
    settle(timed, "after", started_at=NOON + HOUR, finished_at=NOON + HOUR + 59)
    assert (left(timed), timed.account.topped_up) == ([COST], 1000 - COST)
    assert timed.ledger.check().ok


def test_a_request_after_the_expiry_never_spends_what_expired(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 1000, "grant", expires_at=NOON + HOUR)
    clock.now = NOON + HOUR + 60
    assert settle(timed, "after", started_at=NOON + HOUR, finished_at=clock.now).charged == 0
    assert left(timed) == [1000]
    assert timed.ledger.check().ok


def test_the_rest_of_a_grant_is_removed_an_hour_after_its_expiry(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 100, "grant", expires_at=NOON + HOUR)
    timed.ledger.credit(timed.account_id, 7, "grant")
    settle(timed, "r1")
    clock.now = NOON + HOUR + GRACE_S - 0.001
    assert timed.ledger.expire_grants() == 0
    version = timed.account.version
    clock.now = NOON + HOUR + GRACE_S
    assert timed.ledger.expire_grants() == 1
    assert timed.ledger.expire_grants() == 0
    account = timed.account
    assert (account.granted, account.expiring, left(timed)) == (7, (), [0, 7])
    assert account.version == version + 1  # the feed reports it
    assert timed.ledger.check().ok
    settle(timed, "late", started_at=NOON, finished_at=NOON + 60)  # too late for the grant: only 7 are left for it
    assert timed.account.granted == 0
    assert timed.ledger.check().ok


def test_expired_grants_are_removed_in_batches_of_bounded_size(timed: Books, clock: Clock) -> None:
    other = Books(timed.ledger, top_up=3)
    for number in range(5):
        timed.ledger.credit((timed, other)[number % 2].account_id, 10, "grant", expires_at=NOON + HOUR + number)
    clock.now += 3 * HOUR
    assert [timed.ledger.expire_grants(limit=2) for _ in range(4)] == [2, 2, 1, 0]
    assert (timed.account.balance, other.account.balance) == (0, 3)
    assert timed.ledger.check().ok
    for wrong in (0, -1, 1.5, 10**9):
        with pytest.raises(InvalidValue):
            timed.ledger.expire_grants(limit=wrong)  # type: ignore[arg-type]


def test_processes_that_expire_at_the_same_time_take_each_grant_once(timed: Books, clock: Clock, url: str) -> None:
    for number in range(30):
        timed.ledger.credit(timed.account_id, 10, "grant", expires_at=NOON + HOUR + number)
    clock.now += 3 * HOUR

    def expire(_: int) -> int:
        with Ledger(url, now=clock) as mine:
            return sum(mine.expire_grants(limit=3) for _ in range(10))

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(expire, range(3))) == 30
    assert timed.account.balance == 0
    assert timed.ledger.check().ok


def test_only_a_grant_expires_and_only_later(timed: Books) -> None:
    before = timed.account
    for kind, expires_at in [("top_up", NOON + DAY), ("grant", NOON), ("grant", NOON - 1), ("grant", float("nan"))]:
        with pytest.raises(InvalidValue):
            timed.ledger.credit(timed.account_id, 5, kind, expires_at=expires_at)  # type: ignore[arg-type]
    assert timed.account == before
    assert timed.ledger.check().ok


def test_a_repeated_grant_is_given_once_even_if_it_comes_late(timed: Books, clock: Clock) -> None:
    def give(expires_at: float | None) -> Any:
        return timed.ledger.credit(timed.account_id, 5, "grant", idempotency_key="promo", expires_at=expires_at)

    once = give(NOON + HOUR)
    with pytest.raises(Conflict):
        give(None)
    with pytest.raises(Conflict):
        give(NOON + 2 * HOUR)
    clock.now += DAY
    assert give(NOON + HOUR) == once
    assert left(timed) == [5]


lots = st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 20)), max_size=6)


@given(lots=lots, started_at=st.integers(0, 20), part=st.floats(0, 1))
def test_spending_takes_exactly_what_was_asked_in_order_and_only_what_pays(
    lots: list[tuple[int, int | None]], started_at: int, part: float
) -> None:
    mine = [Lot(number, amount, expires_at) for number, (amount, expires_at) in enumerate(lots)]
    mine.sort(key=lambda lot: (lot.expires_at is None, lot.expires_at, lot.grant_id))
    valid = [lot for lot in mine if lot.expires_at is None or lot.expires_at > started_at]
    has = [lot.left for lot in valid]
    amount = int(part * payable(mine, started_at))
    assert payable(mine, started_at) == sum(has)
    expired = [lot.left for lot in mine if lot not in valid]
    spend(mine, amount, started_at)
    assert sum(has) - sum(lot.left for lot in valid) == amount
    assert [lot.left for lot in mine if lot not in valid] == expired
    spent = [before - lot.left for before, lot in zip(has, valid, strict=True)]
    touched = [place for place, one in enumerate(spent) if one]
    assert all(valid[place].left == 0 for place in range(max(touched, default=0)))
    with pytest.raises(AssertionError):
        spend(mine, payable(mine, started_at) + 1, started_at)
