"""A mistaken grant is taken back: the rest of it, once, by an entry of its own."""

from __future__ import annotations

import pytest

from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, GrantNotFound, InsufficientBalance, InvalidValue

from .books import COST, NOON, Books

OPERATOR = Audit("ada")


def numbers(books: Books) -> list[int]:
    return [grant.grant_id for grant in books.ledger.grants(books.account_id)]


def left(books: Books) -> list[int]:
    return [grant.left for grant in books.ledger.grants(books.account_id)]


@pytest.fixture
def books(timed: Books) -> Books:
    """Two grants, of which the first is partly spent, and a top-up."""
    timed.ledger.credit(timed.account_id, 100, "grant", expires_at=NOON + 3600)
    timed.ledger.credit(timed.account_id, 70, "grant")
    timed.ledger.credit(timed.account_id, 1000)
    timed.ledger.settle([timed.settlement("r1")])
    return timed


def test_taking_back_a_grant_removes_only_the_rest_of_this_grant(books: Books) -> None:
    before = books.account
    first, _ = numbers(books)
    after = books.ledger.take_back(books.account_id, first, memo="wrong account")
    assert (after.granted, after.topped_up) == (70, 1000)
    assert (left(books), after.expiring) == ([0, 70], ())
    assert after.version == before.version + 1  # so the feed reports it to the limiter
    assert books.ledger.check().ok
    books.ledger.settle([books.settlement("r2")])
    assert left(books) == [0, 70 - COST]
    assert books.ledger.check().ok


def test_a_lasting_grant_can_be_taken_back_too(books: Books) -> None:
    books.ledger.take_back(books.account_id, numbers(books)[1], memo="twice")
    assert left(books) == [100 - COST, 0]
    assert books.ledger.check().ok


def test_a_grant_without_a_rest_can_not_be_taken_back(books: Books) -> None:
    first, second = numbers(books)
    books.ledger.take_back(books.account_id, first, memo="m")
    before = books.account
    with pytest.raises(InsufficientBalance, match=f"nothing is left of grant {first}"):
        books.ledger.take_back(books.account_id, first, memo="m")
    other = Books(books.ledger)
    top_up = second + 1
    for account_id, grant_id in ((other.account_id, second), (books.account_id, 10**6), (books.account_id, top_up)):
        with pytest.raises(GrantNotFound):
            books.ledger.take_back(account_id, grant_id, memo="m")
    with pytest.raises(AccountNotFound):
        books.ledger.take_back("acct_none", second, memo="m")
    for memo in ("", "line\nfeed", "x" * 500):
        with pytest.raises(InvalidValue):
            books.ledger.take_back(books.account_id, second, memo=memo)
    assert books.account == before


def test_a_grant_is_taken_back_once_under_an_idempotency_key(books: Books) -> None:
    first, second = numbers(books)
    answers = [books.ledger.take_back(books.account_id, first, memo="m", idempotency_key="t") for _ in range(3)]
    assert {answer.granted for answer in answers} == {70}
    for grant_id, memo in ((second, "m"), (first, "n")):
        with pytest.raises(Conflict):
            books.ledger.take_back(books.account_id, grant_id, memo=memo, idempotency_key="t")
    with pytest.raises(Conflict):
        books.ledger.correct(books.account_id, -54, memo="m", idempotency_key="t")
    books.ledger.credit(books.account_id, 5, idempotency_key="c")
    with pytest.raises(Conflict):
        books.ledger.take_back(books.account_id, second, memo="m", idempotency_key="c")
    assert left(books) == [0, 70]
    assert books.ledger.check().ok


def test_the_audit_log_records_who_took_what_back_and_why(books: Books) -> None:
    first, _ = numbers(books)
    books.ledger.take_back(books.account_id, first, memo="wrong account", audit=OPERATOR)
    [record] = books.ledger.audit_log()
    assert (record.actor, record.action, record.account_id) == ("ada", "take_back", books.account_id)
    detail = dict(record.detail)
    assert detail.pop("entry") > first
    assert detail == {"grant": first, "amount": COST - 100, "memo": "wrong account"}


def test_a_request_that_counted_on_the_grant_is_paid_from_other_funds(books: Books) -> None:
    for grant_id in numbers(books):
        books.ledger.take_back(books.account_id, grant_id, memo="m")
    books.ledger.settle([books.settlement("late")])
    assert (books.account.granted, books.account.topped_up) == (0, 1000 - COST)
    assert books.ledger.check().ok
