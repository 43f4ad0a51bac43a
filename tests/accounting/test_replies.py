"""A reply is kept for a day with its settlement, for retries under its idempotency key."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serve_app.accounting.replies import KEPT_S, MAX_BODY, ReplyQuota
from serve_app.contracts.books import Outcome, Settled, Settlement, StoredReply

from .books import COST, Books, Clock, Ledger

REPLY = StoredReply("retry-1", "sha256:0123", '{"choices":[{"message":"π \0 🙂"}]}'.encode())


@pytest.fixture
def funded(timed: Books) -> Books:
    timed.ledger.credit(timed.account_id, 10**9)
    return timed


def replied(books: Books, request_id: str, reply: Any = REPLY, **changed: Any) -> Settlement:
    return books.settlement(request_id, reply=reply, **changed)


def test_a_reply_is_found_under_its_key_for_24_hours(funded: Books, clock: Clock) -> None:
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None
    funded.ledger.settle([replied(funded, "r1"), funded.settlement("r2")])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY
    for nothing in ("retry-2", "", "a\0b", "\ud800"):
        assert funded.ledger.find_reply(funded.account_id, nothing) is None
    assert funded.ledger.find_reply("acct_none", "retry-1") is None
    clock.now += KEPT_S - 0.001
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY
    clock.now += 0.001
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None
    assert funded.ledger.check().ok


def test_an_account_never_sees_the_reply_of_another(funded: Books) -> None:
    other = Books(funded.ledger, name="B")
    theirs = StoredReply("retry-1", "sha256:4567", b"theirs")
    funded.ledger.settle([replied(funded, "r1"), replied(other, "r2", theirs)])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY
    assert funded.ledger.find_reply(other.account_id, "retry-1") == theirs


def test_the_first_reply_under_a_key_stands_until_it_is_forgotten(funded: Books, clock: Clock) -> None:
    later = StoredReply("retry-1", "sha256:89ab", b"later")
    funded.ledger.settle([replied(funded, "r1"), replied(funded, "r2", later)])
    funded.ledger.settle([replied(funded, "r3", later)])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY
    clock.now += KEPT_S  # forgotten, and not pruned yet
    funded.ledger.settle([replied(funded, "r4", later)])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == later
    assert funded.account.topped_up == 10**9 - 4 * COST  # usage is billed even if no reply is stored
    assert funded.ledger.check().ok


def test_old_replies_are_pruned_and_young_ones_stay(funded: Books, clock: Clock) -> None:
    funded.ledger.settle([replied(funded, f"r{n}", StoredReply(f"key{n}", "f", b"b")) for n in range(3)])
    clock.now += 60
    funded.ledger.settle([replied(funded, "r4", StoredReply("young", "f", b"b"))])
    assert funded.ledger.prune_replies() == 0
    clock.now += KEPT_S - 60
    assert funded.ledger.prune_replies() == 3
    assert funded.ledger.prune_replies() == 0
    assert funded.ledger.find_reply(funded.account_id, "young") is not None


def test_a_repeated_settlement_can_add_a_reply_that_was_missing(funded: Books) -> None:
    funded.ledger.settle([funded.settlement("r1")])
    (again,) = funded.ledger.settle([replied(funded, "r1")])
    assert isinstance(again, Settled)
    assert again.duplicate
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY


def test_a_reply_that_is_not_what_was_billed_is_not_kept(funded: Books) -> None:
    # With the same tokens it is: see test_the_better_settlement_may_come_after_that_of_a_replica.
    funded.ledger.settle([funded.settlement("r1", outcome=Outcome.CANCELLED, completion_tokens=3)])
    funded.ledger.settle([replied(funded, "r1")])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None


def test_a_refused_settlement_keeps_no_reply(funded: Books) -> None:
    funded.ledger.settle([replied(funded, "r1", prompt_tokens=-1), replied(funded, "r2", key_id="key_none")])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None
    assert funded.ledger.check().ok


def test_a_reply_that_cannot_be_stored_is_still_billed(funded: Books, caplog: pytest.LogCaptureFixture) -> None:
    wrong = [
        StoredReply("", "f", b"b"),
        StoredReply("k" * 256, "f", b"b"),
        StoredReply("a\0b", "f", b"b"),
        StoredReply("key", "f\n", b"b"),
        StoredReply("key", "f", b"b" * (MAX_BODY + 1)),
        StoredReply("key", "f", "text"),  # type: ignore[arg-type]
        {"idempotency_key": "key"},
    ]
    with caplog.at_level(logging.ERROR):
        settled = funded.ledger.settle([replied(funded, f"r{number}", one) for number, one in enumerate(wrong)])
    assert [one.charged for one in settled if isinstance(one, Settled)] == [COST] * len(wrong)
    assert len(caplog.records) == len(wrong)
    assert funded.ledger.find_reply(funded.account_id, "key") is None


def kept(books: Books) -> list[str]:
    names = [f"k{number:02}" for number in range(40)]
    return [name for name in names if books.ledger.find_reply(books.account_id, name)]


def fill(books: Books, clock: Clock, count: int, size: int) -> None:
    for number in range(count):
        clock.now += 1
        reply = StoredReply(f"k{number:02}", "fingerprint", b"x" * size)
        books.ledger.settle([replied(books, f"r{number:02}", reply)])


@pytest.mark.parametrize(
    ("quota", "left"), [(ReplyQuota(32, 2**30), 32), (ReplyQuota(1000, 10 * 1000), 10)], ids=["number", "bytes"]
)
def test_an_account_keeps_its_newest_replies_up_to_its_quota(
    url: str, clock: Clock, quota: ReplyQuota, left: int
) -> None:
    with Ledger(url, now=clock, reply_quota=quota) as ledger:
        books, other = Books(ledger), Books(ledger, name="B")
        ledger.settle([replied(other, "theirs")])
        fill(books, clock, 40, 1000)
        # To look after each sixteenth lets an account have so much more.
        assert left <= len(kept(books)) <= left + max(1, quota.replies // 16 if left == 32 else 1)
        assert kept(books) == [f"k{number:02}" for number in range(40 - len(kept(books)), 40)]
        assert ledger.find_reply(other.account_id, "retry-1") == REPLY
        assert ledger.account_totals(books.account_id).requests == 40, "usage is not touched"
        assert ledger.check().ok


def test_the_quota_holds_from_the_start_of_a_process(url: str, clock: Clock) -> None:
    with Ledger(url, now=clock) as ledger:
        books = Books(ledger)
        fill(books, clock, 40, 10)
    with Ledger(url, now=clock, reply_quota=ReplyQuota(32, 2**30)) as ledger:
        books = Books.of(ledger, books.account_id, books.key_id)
        ledger.settle([replied(books, "next")])
        assert len(kept(books)) == 31
