"""Accounts are found by what operators type; a credit that waits is booked once, by another operator."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidAmount, InvalidValue
from serve_app.contracts.operators import (
    AskCredit,
    DecideCredit,
    ListPendingCredits,
    PendingCredit,
    SearchAccounts,
    SetOperatorRole,
)
from serve_app.contracts.people import AcceptInvitation, FindPerson, InvitePerson, JoinAccount

from .books import Books, Clock

FAY, FRED = Audit("fay@example.org"), Audit("fred@example.org")


def found(books: Books, text: str, limit: int = 100) -> list[str]:
    return [one.account.name for one in books.ledger.run(SearchAccounts(text, limit)).rows]


def test_a_search_takes_no_character_for_a_pattern(books: Books) -> None:
    for name in ("100% Ltd", "a_b", "Back\\slash", "Zoë"):
        books.ledger.create_account(name)
    assert found(books, "%") == ["100% Ltd"]
    assert found(books, "_") == ["a_b"]
    assert found(books, "\\") == ["Back\\slash"]
    assert found(books, "LTD") == ["100% Ltd"]
    assert found(books, books.account_id[:12]) == ["Ada"]
    assert found(books, "") == found(books, "  ")
    assert len(found(books, "", 2)) == 2
    for wrong in ("\0", "a\nb"):
        with pytest.raises(InvalidValue):
            found(books, wrong)


def asked(books: Books, amount: int = 500) -> PendingCredit:
    return books.ledger.run(AskCredit(books.account_id, amount, "grant", "sorry", FAY))


def test_a_credit_is_booked_once_and_not_by_who_asked(books: Books) -> None:
    run, before, wanted = books.ledger.run, books.account.balance, asked(books)
    assert run(ListPendingCredits()) == [wanted]
    with pytest.raises(InvalidValue, match="another operator"):
        run(DecideCredit(wanted.pending_id, True, FAY))
    assert run(DecideCredit(wanted.pending_id, True, FRED)) is True
    assert run(DecideCredit(wanted.pending_id, True, FRED)) is False
    assert run(DecideCredit(wanted.pending_id, False, FRED)) is False
    assert run(DecideCredit("pending_none", True, FRED)) is False
    assert (books.account.balance, run(ListPendingCredits())) == (before + 500, [])
    [grant] = books.ledger.grants(books.account_id)
    assert grant.memo == "sorry (asked for by fay@example.org)"
    assert books.ledger.check().ok


def given(books: Books, amount: int, actor: Audit = FAY, **more: Any) -> bool:
    """Requests a credit and returns whether it was booked at once. One operator may give 100 alone."""
    return books.ledger.run(AskCredit(books.account_id, amount, "grant", "sorry", actor, 100, **more)).booked


def test_what_an_operator_gives_alone_in_a_day_is_bounded_however_it_is_divided(timed: Books, clock: Clock) -> None:
    before = timed.account.balance
    assert [given(timed, 40) for _ in range(4)] == [True, True, False, False]
    assert [given(timed, 20), given(timed, 1), given(timed, 100, FRED)] == [True, False, True]
    assert timed.account.balance == before + 200
    for wanted in timed.ledger.run(ListPendingCredits()):
        timed.ledger.run(DecideCredit(wanted.pending_id, True, FRED if wanted.asked_by == FAY.actor else FAY))
    assert timed.account.balance == before + 281
    assert not given(timed, 1, FRED)  # what he has approved is not his
    clock.now += 86_400
    assert [given(timed, 100), given(timed, 1), given(timed, 100, FRED)] == [True, False, True]
    assert timed.ledger.check().ok


def test_a_form_that_is_sent_twice_gives_once_and_takes_no_other_credits_key(books: Books) -> None:
    books.ledger.credit(books.account_id, 50, idempotency_key="stripe pi_1")
    before = books.account.balance
    for _ in range(2):
        assert given(books, 7, once="form")
        assert not given(books, 107, once="large")
    assert given(books, 5, once="stripe pi_1")
    assert books.account.balance == before + 12
    assert len(books.ledger.run(ListPendingCredits())) == 1
    with pytest.raises(Conflict):
        given(books, 8, once="form")


def test_who_asked_may_withdraw_it(books: Books) -> None:
    before, wanted = books.account.balance, asked(books)
    assert books.ledger.run(DecideCredit(wanted.pending_id, False, FAY)) is True
    assert books.account.balance == before


def test_what_could_not_be_booked_is_not_asked_for(books: Books) -> None:
    for amount in (0, -1, 10**17 + 1):
        with pytest.raises(InvalidAmount):
            asked(books, amount)
    with pytest.raises(AccountNotFound):
        books.ledger.run(AskCredit("acct_none", 1, "grant", "", FAY))
    with pytest.raises(InvalidValue):
        books.ledger.run(AskCredit(books.account_id, 1, "other", "", FAY))  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="no person has the address"):
        books.ledger.run(SetOperatorRole("nobody@example.org", "admin", books.account_id))


def test_an_address_that_a_customer_has_invited_gets_no_role(books: Books) -> None:
    """Whoever manages an account can invite any address, and accept the invitation in its name."""
    run = books.ledger.run
    run(InvitePerson(books.account_id, "ada@example.org", "member", "digest", 4e9))
    run(AcceptInvitation("digest", "Ada", "a hash"))
    staff = books.ledger.create_account("Staff").account_id
    run(InvitePerson(staff, "ada@example.org", "member", "the staff's digest", 4e9))
    for account_id in (staff, None, "acct_none"):
        with pytest.raises(InvalidValue, match=r"account_id is missing: name|is not a member of"):
            run(SetOperatorRole("ada@example.org", "admin", account_id))
    person = run(FindPerson("ada@example.org"))
    assert person is not None
    assert person.operator_role is None
    run(JoinAccount("the staff's digest", person.user_id))
    assert run(SetOperatorRole("ada@example.org", "admin", staff)).operator_role == "admin"
    assert run(SetOperatorRole("ada@example.org", None)).operator_role is None
