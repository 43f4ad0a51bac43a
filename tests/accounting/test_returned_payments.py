"""Tests that a returned payment is deducted once, after the payment was recorded.

A reinstated amount is credited again, and no account gains.
"""

from __future__ import annotations

import pytest

from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, InvalidAmount
from serve_app.contracts.payments import ReturnKind, ReturnPayment

from .books import Books

STRIPE = Audit("stripe")


def paid(books: Books, amount: int = 100, key: str = "stripe p1") -> str:
    """Another account, which has paid this."""
    account_id = books.ledger.create_account("Bob").account_id
    books.ledger.credit(account_id, amount, idempotency_key=key)
    return account_id


def give_back(
    books: Books, account_id: str, amount: int, key: str, kind: ReturnKind = "refund", reverses: str = "stripe p1"
) -> int | None:
    return books.ledger.run(ReturnPayment(account_id, amount, key, reverses, STRIPE, kind))


def topped_up(books: Books, account_id: str) -> int:
    return books.ledger.get_account(account_id).topped_up


def test_a_return_takes_what_was_paid_and_is_left_and_never_a_grant(books: Books) -> None:
    account_id = paid(books)
    books.ledger.credit(account_id, 50, kind="grant")
    for _ in range(2):
        assert give_back(books, account_id, 60, "stripe r1") == 0
    assert give_back(books, account_id, 60, "stripe r2", "chargeback") == 20
    account = books.ledger.get_account(account_id)
    assert (account.topped_up, account.granted, account.active) == (0, 50, False)
    assert books.ledger.check().ok
    for amount in (0, -1):
        with pytest.raises(InvalidAmount):
            give_back(books, account_id, amount, "stripe r3")
    with pytest.raises(AccountNotFound):
        give_back(books, "acct_none", 60, "stripe r3")


def test_a_return_of_what_was_all_spent_is_known_when_it_is_reported_again(books: Books) -> None:
    account_id = paid(books)
    books.ledger.correct(account_id, -100, memo="all is spent")
    assert give_back(books, account_id, 60, "stripe r1", "chargeback") == 60
    books.ledger.set_active(account_id, True)
    books.ledger.credit(account_id, 100)
    before = books.ledger.audit_log(account_id)
    assert give_back(books, account_id, 60, "stripe r1", "chargeback") == 0
    account = books.ledger.get_account(account_id)
    assert (account.topped_up, account.active) == (100, True)
    assert books.ledger.audit_log(account_id) == before


@pytest.mark.parametrize("kind", ["refund", "chargeback", "reinstatement"])
def test_what_comes_before_the_payment_that_it_reverses_is_not_recorded(books: Books, kind: ReturnKind) -> None:
    """Not even as a loss: the payment would be credited afterwards, and nothing would take it."""
    account_id = paid(books, key="stripe p0")
    before = books.ledger.audit_log(account_id)
    assert give_back(books, account_id, 60, "stripe r1", kind) is None
    assert (topped_up(books, account_id), books.ledger.get_account(account_id).active) == (100, True)
    assert books.ledger.audit_log(account_id) == before
    paid(books, key="stripe p1")  # by another account
    assert give_back(books, account_id, 60, "stripe r1", kind) is None


@pytest.mark.parametrize(
    ("spent", "refunded", "reinstated", "left"),
    [
        (0, 0, 100, 100),
        (70, 0, 100, 30),  # 70 of the chargeback were not covered: the customer has had them
        (100, 0, 100, 0),
        (0, 40, 40, 0),  # the dispute was lost, and only what had been refunded before came again
        (0, 40, 100, 60),
        (60, 40, 40, 0),
    ],
)
def test_a_chargeback_that_is_reinstated_leaves_what_was_paid_and_not_spent(
    books: Books, spent: int, refunded: int, reinstated: int, left: int
) -> None:
    account_id = paid(books)
    if refunded:
        assert give_back(books, account_id, refunded, "stripe r1") == 0
    if spent:
        books.ledger.correct(account_id, -spent, memo="spent")
    give_back(books, account_id, 100, "stripe d1", "chargeback")
    assert topped_up(books, account_id) == 0
    for _ in range(2):
        assert give_back(books, account_id, reinstated, "stripe d1 reinstated", "reinstatement", "stripe d1") == 0
    assert give_back(books, account_id, 100, "stripe d1", "chargeback") == 0  # reported again
    assert (topped_up(books, account_id), books.ledger.get_account(account_id).active) == (left, False)
    assert books.ledger.check().ok
