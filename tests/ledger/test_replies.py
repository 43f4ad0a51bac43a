"""A reply is kept for a day with its settlement, for retries under its idempotency key."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serve_app.ledger import Outcome, Settled, Settlement, StoredReply
from serve_app.ledger.replies import KEPT_S, MAX_BODY

from .books import COST, Books, Clock

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
    assert funded.account.topped_up == 10**9 - 4 * COST  # whatever is kept, usage is billed
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


def test_a_reply_comes_with_a_repetition_of_who_had_none(funded: Books) -> None:
    funded.ledger.settle([funded.settlement("r1")])
    (again,) = funded.ledger.settle([replied(funded, "r1")])
    assert isinstance(again, Settled)
    assert again.duplicate
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == REPLY


def test_a_reply_that_is_not_what_was_billed_is_not_kept(funded: Books) -> None:
    funded.ledger.settle([funded.settlement("r1", outcome=Outcome.CANCELLED)])
    funded.ledger.settle([replied(funded, "r1")])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None


def test_a_refused_settlement_keeps_no_reply(funded: Books) -> None:
    funded.ledger.settle([replied(funded, "r1", prompt_tokens=-1), replied(funded, "r2", key_id="key_none")])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") is None
    assert funded.ledger.check().ok


def test_a_reply_that_cannot_be_kept_is_billed_all_the_same(funded: Books, caplog: pytest.LogCaptureFixture) -> None:
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
