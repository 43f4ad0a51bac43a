"""Operators see the usage of all accounts, and find an account by its state, its balance and its spending."""

from __future__ import annotations

import pytest

from serve_app.contracts.books import Audit, Outcome
from serve_app.contracts.errors import AccountNotFound, InvalidValue
from serve_app.contracts.operators import (
    AddNote,
    EndAnnouncement,
    ListAnnouncements,
    ListEntries,
    ListNotes,
    ListUncharged,
    NameSubjects,
    PublishAnnouncement,
    SearchAccounts,
    SumAccountDays,
    SumService,
)
from serve_app.contracts.people import AcceptInvitation, GetPerson, InvitePerson, SearchPeople
from serve_app.contracts.units import DAY_S

from .books import COST, NOON, Books, Clock, settlement

TODAY, YESTERDAY = "2026-06-01", "2026-05-31"
ANN = Audit("ann@example.org")


def second_account(books: Books, name: str = "Bob") -> Books:
    return Books(books.ledger, top_up=10**6, name=name)


def test_the_usage_of_all_accounts_is_summed_by_day_with_the_largest_spender_first(books: Books) -> None:
    bob = second_account(books)
    books.ledger.settle([books.settlement("r1"), books.settlement("r0", finished_at=NOON - DAY_S)])
    books.ledger.settle([bob.settlement(f"b{number}") for number in range(3)])
    used = books.ledger.run(SumService(YESTERDAY, TODAY))
    assert [(row.day, row.requests, row.charged) for row in used.days] == [(YESTERDAY, 1, COST), (TODAY, 4, 4 * COST)]
    assert [(one.name, one.requests, one.tokens, one.charged) for one in used.top] == [
        ("Bob", 3, 3 * 14, 3 * COST),
        ("Ada", 2, 2 * 14, 2 * COST),
    ]
    assert (used.active, used.currency) == (2, "USD")
    assert [one.name for one in books.ledger.run(SumService(YESTERDAY, YESTERDAY, 1)).top] == ["Ada"]
    assert books.ledger.run(SumService("2026-01-01", "2026-01-02")).active == 0
    with pytest.raises(InvalidValue):
        books.ledger.run(SumService(TODAY, YESTERDAY))
    days = books.ledger.run(SumAccountDays((bob.account_id, "acct_none"), YESTERDAY, TODAY))
    assert [(row.account_id, row.day, row.charged) for row in days] == [(bob.account_id, TODAY, 3 * COST)]
    with pytest.raises(InvalidValue, match="at most"):
        books.ledger.run(SumAccountDays(("acct_a",) * 101, TODAY, TODAY))


def test_the_latest_requests_without_a_charge_are_listed(books: Books) -> None:
    for number in range(3):
        books.ledger.settle([books.settlement(f"f{number}", outcome=Outcome.FAILED), books.settlement(f"r{number}")])
    found = books.ledger.run(ListUncharged(2))
    assert [(one.request_id, one.outcome) for one in found] == [("f2", Outcome.FAILED), ("f1", Outcome.FAILED)]


def test_accounts_are_filtered_and_come_in_pages(books: Books) -> None:
    ledger = books.ledger
    for number in range(5):
        ledger.create_account(f"Empty {number}")
    ledger.set_active(books.account_id, False)
    ledger.settle([books.settlement("r1")])

    def names(**filters: object) -> list[str]:
        return [one.account.name for one in ledger.run(SearchAccounts("", **filters)).rows]  # type: ignore[arg-type]

    assert names(active=False) == ["Ada"]
    assert len(names(active=True)) == 5
    assert "Ada" not in names(below=1)
    assert names(below=10**12 + 1, active=False) == ["Ada"]
    assert names(spending=True, day_from=TODAY) == ["Ada"]
    assert names(spending=True, day_from="2026-06-02") == []
    assert len(names(spending=False, day_from=TODAY)) == 5
    [one] = ledger.run(SearchAccounts("ada", day_from=TODAY)).rows
    assert (one.charged, one.requests) == (COST, 1)
    seen, after = list[str](), None
    while True:
        page = ledger.run(SearchAccounts("", 2, after=after))
        seen += [one.account.account_id for one in page.rows]
        if (after := page.next) is None:
            break
    assert (len(seen), len(set(seen))) == (6, 6)
    with pytest.raises(AccountNotFound):
        ledger.run(SearchAccounts("", after="acct_none"))
    for wrong in ({"day_from": "yesterday"}, {"order": "richest"}):
        with pytest.raises(InvalidValue):
            ledger.run(SearchAccounts("", **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("newest", ["cleo", "Bob", "Bob", "Ada"]),
        ("name", ["Ada", "Bob", "Bob", "cleo"]),
        ("lowest balance", ["cleo", "Bob", "Bob", "Ada"]),
        ("highest balance", ["Ada", "Bob", "Bob", "cleo"]),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_accounts_are_listed_in_the_chosen_order_over_all_pages(
    timed: Books, clock: Clock, order: str, expected: list[str], limit: int
) -> None:
    ledger = timed.ledger
    ledger.credit(timed.account_id, 10**9)
    for name, credit in (("Bob", 500), ("Bob", 500), ("cleo", 20)):
        clock.now += 1
        ledger.credit(ledger.create_account(name).account_id, credit)
    seen, ids, after = list[str](), set[str](), None
    while True:
        page = ledger.run(SearchAccounts("", limit, after=after, order=order))
        seen += [one.account.name for one in page.rows]
        ids |= {one.account.account_id for one in page.rows}
        if (after := page.next) is None:
            break
    assert (seen, len(ids)) == (expected, 4)


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_accounts_are_listed_by_what_they_spent_today_and_then_newest_first(timed: Books, limit: int) -> None:
    bob, carl = second_account(timed), second_account(timed, "Carl")
    timed.ledger.settle([carl.settlement("r1"), *(bob.settlement(f"b{number}") for number in range(3))])
    timed.ledger.settle([carl.settlement(f"y{number}", finished_at=NOON - DAY_S) for number in range(5)])
    for name in ("cleo", "dora", "emil"):
        timed.ledger.create_account(name)
    seen, after = list[str](), None
    while True:
        page = timed.ledger.run(SearchAccounts("", limit, after=after, order="highest spend today"))
        seen += [one.account.name for one in page.rows]
        if (after := page.next) is None:
            break
    assert (seen[:2], sorted(seen[2:])) == (["Bob", "Carl"], ["Ada", "cleo", "dora", "emil"])


def test_an_accounts_entries_are_those_of_money_and_no_charges(timed: Books, clock: Clock) -> None:
    ledger, account_id = timed.ledger, timed.account_id
    ledger.credit(account_id, 700, memo="invoice 7")
    clock.now += 1
    ledger.credit(account_id, 30, "grant", memo="sorry")
    ledger.settle([timed.settlement("r1")])
    clock.now += 1
    ledger.correct(account_id, -20, memo="ticket 8")
    found = ledger.run(ListEntries(account_id))
    assert [(one.kind, one.amount, one.memo) for one in found] == [
        ("correction", -20, "ticket 8"), ("grant", 30, "sorry"), ("top_up", 700, "invoice 7"),
    ]  # fmt: skip
    assert len(ledger.run(ListEntries(account_id, 1))) == 1
    with pytest.raises(AccountNotFound):
        ledger.run(ListEntries("acct_none"))


def test_ids_are_named_and_unknown_ones_left_out(books: Books) -> None:
    books.ledger.run(InvitePerson(books.account_id, "Eve@example.org", "owner", "d" * 64, 1e12))
    person = books.ledger.run(AcceptInvitation("d" * 64, "Eve", "hash"))
    ids = (books.account_id, books.key_id, person.user_id, "acct_none", "a\0b")
    assert books.ledger.run(NameSubjects(ids)) == {
        books.account_id: "Ada", books.key_id: "main", person.user_id: "eve@example.org",
    }  # fmt: skip
    for text in ("EVE@", "example.org", "eve"):
        assert [one.user_id for one in books.ledger.run(SearchPeople(text))] == [person.user_id]
    assert books.ledger.run(SearchPeople("%")) == []
    assert books.ledger.run(GetPerson(person.user_id)) == person
    with pytest.raises(InvalidValue):
        books.ledger.run(GetPerson("user_none"))


def test_a_note_is_added_once_and_audited_without_its_text(timed: Books, clock: Clock) -> None:
    ledger, account_id = timed.ledger, timed.account_id
    for _ in range(2):
        ledger.run(AddNote(account_id, "  called\n them ", ANN, "once1"))
    clock.now += 1
    ledger.run(AddNote(account_id, "paid", ANN))
    assert [(one.text, one.author) for one in ledger.run(ListNotes(account_id))] == [
        ("paid", ANN.actor),
        ("called them", ANN.actor),
    ]
    assert [(one.action, one.detail) for one in ledger.audit_log()] == [("add_note", {})] * 2
    for text in ("", " \n", "x" * 1001):
        with pytest.raises(InvalidValue):
            ledger.run(AddNote(account_id, text, ANN))
    with pytest.raises(AccountNotFound):
        ledger.run(AddNote("acct_none", "x", ANN))


def test_a_notice_is_listed_until_it_ends(timed: Books, clock: Clock) -> None:
    ledger = timed.ledger

    def texts(*, ended: bool = False) -> list[str]:
        return [one.text for one in ledger.run(ListAnnouncements(ended=ended))]

    for _ in range(2):
        one = ledger.run(PublishAnnouncement("Maintenance", "warning", ANN, ends_at=NOON + 60, once="o"))
    later = ledger.run(PublishAnnouncement("Later", "info", ANN, timed.account_id, NOON + 100))
    assert texts() == ["Later", "Maintenance"]
    clock.now = NOON + 60
    assert texts() == ["Later"]
    assert texts(ended=True) == ["Later", "Maintenance"]
    for _ in range(2):
        ledger.run(EndAnnouncement(later.announcement_id, ANN))
    assert texts() == []
    assert [(record.action, record.account_id) for record in ledger.audit_log()] == [
        ("end_notice", timed.account_id), ("publish_notice", timed.account_id), ("publish_notice", ""),
    ]  # fmt: skip
    assert one.starts_at == NOON
    for wrong in (
        PublishAnnouncement("", "info", ANN),
        PublishAnnouncement("x", "loud", ANN),
        PublishAnnouncement("x", "info", ANN, ends_at=NOON),
    ):
        with pytest.raises(InvalidValue):
            ledger.run(wrong)
    with pytest.raises(AccountNotFound):
        ledger.run(PublishAnnouncement("x", "info", ANN, "acct_none"))
    with pytest.raises(InvalidValue):
        ledger.run(EndAnnouncement("notice_none", ANN))


def test_a_search_of_the_audit_log_reads_a_bounded_part_of_it(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = books.ledger
    ledger.set_limits(books.account_id, rpm=1, audit=ANN)
    for number in range(2, 8):
        ledger.set_limits(books.account_id, rpm=number, audit=Audit("Bob@example.org"))
    ledger.set_active(books.account_id, False, audit=ANN)
    assert len(ledger.audit_log(actor="bob@EXAMPLE")) == 6
    assert [one.action for one in ledger.audit_log(actor="ann")] == ["set_active", "set_limits"]
    assert [one.actor for one in ledger.audit_log(action="set_active")] == [ANN.actor]
    assert ledger.audit_log(actor="%") == []
    monkeypatch.setattr("serve_app.accounting.audit_log.MAX_SEARCHED", 3)
    assert [one.action for one in ledger.audit_log(actor="ann")] == ["set_active"]
    assert [one.audit_id for one in ledger.audit_log(actor="ann", after=4)] == [1]


def test_nobody_is_charged_by_looking(books: Books) -> None:
    books.ledger.settle([settlement("r1", books.account_id, books.key_id)])
    books.ledger.run(SumService(TODAY, TODAY))
    books.ledger.run(ListUncharged())
    assert books.ledger.check().ok
