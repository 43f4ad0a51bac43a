"""Accounts, their funds and their limits."""

from __future__ import annotations

import pytest

from serve_app.contracts.errors import (
    AccountNotFound,
    Conflict,
    InsufficientBalance,
    InvalidAmount,
    InvalidValue,
    LedgerUnavailable,
)
from serve_app.contracts.money import MAX_AMOUNT, MAX_BALANCE

from .books import Books, Ledger


def test_accounts_are_listed_oldest_first_page_by_page(ledger: Ledger) -> None:
    made = [ledger.create_account("the same name") for _ in range(5)]
    assert ledger.list_accounts() == made
    first = ledger.list_accounts(limit=2)
    assert first + ledger.list_accounts(after=first[-1].account_id) == made
    assert ledger.get_account(made[3].account_id) == made[3]
    with pytest.raises(AccountNotFound):
        ledger.list_accounts(after="acct_none")


def test_an_idempotency_key_creates_one_account(ledger: Ledger) -> None:
    account = ledger.create_account("Ada", idempotency_key="signup-1")
    assert ledger.create_account("Ada", idempotency_key="signup-1") == account
    assert ledger.list_accounts() == [account]
    with pytest.raises(Conflict, match=account.account_id):
        ledger.create_account("Bob", idempotency_key="signup-1")


def test_a_name_is_1_to_100_printable_characters(ledger: Ledger) -> None:
    for name in ("", " ", "x" * 101, "a\nb", "a\0b", "\ud800"):
        with pytest.raises(InvalidValue):
            ledger.create_account(name)
    ledger.create_account("Zoë 株式会社 🙂")


def test_a_limit_is_set_reset_or_left_alone(books: Books) -> None:
    ledger, account_id = books.ledger, books.account_id
    account = ledger.set_limits(account_id, rpm=10, tpm=1000, concurrency=3)
    assert account.limits == {"rpm": 10, "tpm": 1000, "concurrency": 3}
    account = ledger.set_limits(account_id, rpm=None, concurrency=4)
    assert account.limits == {"tpm": 1000, "concurrency": 4}
    assert ledger.set_limits(account_id, tpm=1000) == account  # no change, no version
    for wrong in (0, -1, 1.5, True, "10"):
        with pytest.raises(InvalidValue, match="rpm"):
            ledger.set_limits(account_id, rpm=wrong)  # type: ignore[arg-type]
    assert ledger.get_account(account_id) == account
    with pytest.raises(AccountNotFound):
        ledger.set_limits("acct_none", rpm=1)


def test_an_account_is_suspended_and_resumed(books: Books) -> None:
    stopped = books.ledger.set_active(books.account_id, False)
    assert not stopped.active
    assert books.ledger.set_active(books.account_id, False) == stopped
    assert books.ledger.set_active(books.account_id, True).version > stopped.version


def test_grants_and_top_ups_are_kept_apart(books: Books) -> None:
    books.ledger.credit(books.account_id, 500, "grant", memo="welcome")
    account = books.ledger.credit(books.account_id, 70)
    assert (account.granted, account.topped_up, account.balance) == (500, 10**12 + 70, 10**12 + 570)
    assert books.ledger.check().ok


def test_a_repeated_credit_adds_once(books: Books) -> None:
    once = books.ledger.credit(books.account_id, 500, idempotency_key="payment-1")
    assert books.ledger.credit(books.account_id, 500, idempotency_key="payment-1") == once
    with pytest.raises(Conflict):
        books.ledger.credit(books.account_id, 501, idempotency_key="payment-1")
    with pytest.raises(Conflict):
        books.ledger.credit(books.account_id, 500, "grant", idempotency_key="payment-1")
    other = books.ledger.create_account("B")
    assert books.ledger.credit(other.account_id, 500, idempotency_key="payment-1").balance == 500


def test_a_credit_is_a_positive_whole_number(books: Books) -> None:
    before = books.account
    for amount in (0, -1, 1.0, True, MAX_AMOUNT + 1, "5"):
        with pytest.raises(InvalidAmount):
            books.ledger.credit(books.account_id, amount)  # type: ignore[arg-type]
    assert books.account == before


def test_a_balance_has_a_bound_far_from_overflow(ledger: Ledger) -> None:
    account_id = ledger.create_account("Rich").account_id
    for _ in range(MAX_BALANCE // MAX_AMOUNT):
        ledger.credit(account_id, MAX_AMOUNT)
    with pytest.raises(InvalidAmount, match="would exceed"):
        ledger.credit(account_id, 1)


def test_a_correction_moves_both_ways_and_never_below_zero(books: Books) -> None:
    assert books.ledger.correct(books.account_id, 5, memo="ticket 7").topped_up == 10**12 + 5
    assert books.ledger.correct(books.account_id, -(10**12), memo="chargeback").topped_up == 5
    with pytest.raises(InsufficientBalance, match=r"0\.000000005"):
        books.ledger.correct(books.account_id, -6, memo="chargeback")
    with pytest.raises(InvalidValue, match="memo"):
        books.ledger.correct(books.account_id, 1, memo="")
    assert books.ledger.check().ok


def test_a_refused_change_changes_nothing(books: Books) -> None:
    before = books.ledger.changes(0)
    with pytest.raises(InvalidValue):
        books.ledger.credit(books.account_id, 5, memo="a\nb")
    with pytest.raises(AccountNotFound):
        books.ledger.credit("acct_none", 5)
    assert books.ledger.changes(0) == before
    assert books.ledger.check().ok


def test_a_database_that_is_away_raises_ledger_unavailable() -> None:
    with pytest.raises(LedgerUnavailable):
        Ledger("postgresql+psycopg://nobody@127.0.0.1:1/none", wait_s=1)
    with pytest.raises(LedgerUnavailable):
        Ledger("sqlite:////no/such/folder/ledger.db")


def test_a_ledger_in_memory_is_refused() -> None:
    for url in ("sqlite://", "sqlite:///:memory:", "mysql://root@localhost/ledger"):
        with pytest.raises(InvalidValue):
            Ledger(url)
