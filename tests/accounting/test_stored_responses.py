"""A response is stored with its settlement, for its account alone, until it expires or is deleted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serve_app.accounting.replies import ReplyQuota
from serve_app.accounting.stored_responses import MAX_BODY
from serve_app.contracts.books import RESPONSE_LOST_S, Settled, Settlement, StoredReply, StoredResponse
from serve_app.contracts.commands import (
    BeatResponses,
    BeginResponse,
    CancelResponse,
    DeleteResponse,
    EndResponse,
    FindResponse,
)
from serve_app.contracts.errors import InvalidValue

from .books import COST, NOON, Books, Clock, Ledger


def stored(response_id: str = "resp_1", body: Any = b"\0body", expires_at: Any = NOON + 60) -> StoredResponse:
    return StoredResponse(response_id, body, expires_at)


@pytest.fixture
def funded(timed: Books) -> Books:
    timed.ledger.credit(timed.account_id, 10**9)
    return timed


def settled(books: Books, request_id: str, response: Any, **changed: Any) -> Settlement:
    return books.settlement(request_id, response=response, **changed)


def find(books: Books, response_id: str = "resp_1") -> StoredResponse | None:
    return books.ledger.run(FindResponse(books.account_id, response_id))


def test_a_response_is_found_by_its_account_until_it_expires(funded: Books, clock: Clock) -> None:
    other = Books(funded.ledger, name="B")
    response = stored(expires_at=clock.now + 60)
    funded.ledger.settle([settled(funded, "r1", response), funded.settlement("r2")])
    assert find(funded) == response
    assert find(other) is None
    for nothing in ("resp_2", "", "a\0b", "\ud800"):
        assert find(funded, nothing) is None
    clock.now += 59.9
    assert find(funded) == response
    clock.now += 0.1
    assert find(funded) is None
    assert funded.ledger.check().ok


def test_the_same_id_of_two_accounts_is_two_responses(funded: Books, clock: Clock) -> None:
    other = Books(funded.ledger, name="B")
    mine, theirs = stored(expires_at=clock.now + 60), stored(body=b"theirs", expires_at=clock.now + 60)
    funded.ledger.settle([settled(funded, "r1", mine), settled(other, "r2", theirs)])
    assert (find(funded), find(other)) == (mine, theirs)


def test_only_its_account_deletes_a_response(funded: Books, clock: Clock) -> None:
    other = Books(funded.ledger, name="B")
    funded.ledger.settle([settled(funded, "r1", stored(expires_at=clock.now + 60))])
    assert not funded.ledger.run(DeleteResponse(other.account_id, "resp_1"))
    assert find(funded) is not None
    assert funded.ledger.run(DeleteResponse(funded.account_id, "resp_1"))
    assert not funded.ledger.run(DeleteResponse(funded.account_id, "resp_1"))
    assert find(funded) is None


def test_a_repeated_settlement_stores_a_response_once_and_does_not_change_it(funded: Books, clock: Clock) -> None:
    first = stored(expires_at=clock.now + 60)
    funded.ledger.settle([settled(funded, "r1", first)])
    (again,) = funded.ledger.settle([settled(funded, "r1", stored(body=b"other", expires_at=clock.now + 90))])
    assert isinstance(again, Settled)
    assert again.duplicate
    assert find(funded) == first


def test_a_response_and_a_reply_for_retries_are_stored_side_by_side(funded: Books, clock: Clock) -> None:
    reply = StoredReply("retry-1", "f", b"reply")
    funded.ledger.settle([settled(funded, "r1", stored(expires_at=clock.now + 60), reply=reply)])
    assert funded.ledger.find_reply(funded.account_id, "retry-1") == reply
    assert find(funded) is not None


def test_expired_responses_are_pruned_and_others_stay(funded: Books, clock: Clock) -> None:
    for number in range(3):
        funded.ledger.settle([settled(funded, f"r{number}", stored(f"resp_{number}", expires_at=clock.now + 60))])
    funded.ledger.settle([settled(funded, "r4", stored("young", expires_at=clock.now + 120))])
    clock.now += 60
    assert funded.ledger.prune_replies() == 3
    assert funded.ledger.prune_replies() == 0
    assert find(funded, "young") is not None


def test_a_response_that_cannot_be_stored_is_still_billed(funded: Books, caplog: pytest.LogCaptureFixture) -> None:
    wrong = [
        stored(""),
        stored("a\0b"),
        stored("r" * 201),
        stored(body=b"b" * (MAX_BODY + 1)),
        stored(body="text"),
        stored(expires_at=float("nan")),
        {"response_id": "resp_1"},
    ]
    with caplog.at_level(logging.ERROR):
        answers = funded.ledger.settle([settled(funded, f"r{number}", one) for number, one in enumerate(wrong)])
    assert [one.charged for one in answers if isinstance(one, Settled)] == [COST] * len(wrong)
    assert len(caplog.records) == len(wrong)
    assert find(funded) is None


def begun(books: Books, clock: Clock) -> None:
    books.ledger.run(BeginResponse(books.account_id, stored(body=b"begun", expires_at=clock.now + 600)))


def test_a_response_that_runs_is_replaced_by_its_settlement_once(funded: Books, clock: Clock) -> None:
    begun(funded, clock)
    begun(funded, clock)
    found = find(funded)
    assert found is not None
    assert (found.body, found.beat_at) == (b"begun", clock.now)
    final = stored(body=b"final", expires_at=clock.now + 700)
    funded.ledger.settle([settled(funded, "r1", final)])
    assert find(funded) == final
    late = stored(body=b"failed", expires_at=clock.now + 600)
    assert not funded.ledger.run(EndResponse(funded.account_id, late))
    begun(funded, clock)
    assert find(funded) == final


def test_a_response_that_failed_stays_as_it_ended(funded: Books, clock: Clock) -> None:
    begun(funded, clock)
    failed = stored(body=b"failed", expires_at=clock.now + 600)
    assert funded.ledger.run(EndResponse(funded.account_id, failed))
    assert not funded.ledger.run(EndResponse(funded.account_id, failed))
    funded.ledger.settle([settled(funded, "r1", stored(body=b"final", expires_at=clock.now + 600))])
    assert find(funded) == failed


def test_a_gateway_renews_its_responses_and_hears_which_are_cancelled(funded: Books, clock: Clock) -> None:
    other = Books(funded.ledger, name="B")
    begun(funded, clock)
    mine = ((funded.account_id, "resp_1"),)
    clock.now += 30
    assert funded.ledger.run(BeatResponses(mine)) == ()
    found = find(funded)
    assert found is not None
    assert found.beat_at == clock.now
    assert not found.is_lost(clock.now + RESPONSE_LOST_S)
    assert found.is_lost(clock.now + RESPONSE_LOST_S + 1)
    assert funded.ledger.run(CancelResponse(other.account_id, "resp_1")) is None
    assert funded.ledger.run(BeatResponses(mine)) == ()
    assert funded.ledger.run(CancelResponse(funded.account_id, "resp_1")) == found
    assert funded.ledger.run(BeatResponses(mine)) == mine


def test_a_response_that_runs_is_deleted_only_when_its_gateway_is_lost(funded: Books, clock: Clock) -> None:
    begun(funded, clock)
    gone = DeleteResponse(funded.account_id, "resp_1")
    assert not funded.ledger.run(gone)
    clock.now += RESPONSE_LOST_S + 1
    assert funded.ledger.run(gone)
    assert find(funded) is None
    assert not funded.ledger.run(gone)


def test_a_lost_response_that_was_deleted_does_not_come_back_when_its_gateway_does(funded: Books, clock: Clock) -> None:
    begun(funded, clock)
    clock.now += RESPONSE_LOST_S + 1
    assert funded.ledger.run(DeleteResponse(funded.account_id, "resp_1"))
    assert funded.ledger.run(BeatResponses(((funded.account_id, "resp_1"),))) == ()
    funded.ledger.settle([settled(funded, "r1", stored(body=b"final", expires_at=clock.now + 600))])
    assert not funded.ledger.run(EndResponse(funded.account_id, stored(body=b"failed", expires_at=clock.now + 600)))
    assert find(funded) is None


def test_a_refused_settlement_stores_no_response(funded: Books, clock: Clock) -> None:
    funded.ledger.settle([settled(funded, "r1", stored(expires_at=clock.now + 60), prompt_tokens=-1)])
    assert find(funded) is None


@pytest.mark.parametrize(("quota", "size", "left"), [(ReplyQuota(replies=16), 1, 16), (ReplyQuota(100, 1600), 100, 16)])
def test_an_account_keeps_its_newest_responses_up_to_its_quota(
    new_url: Any, clock: Clock, quota: ReplyQuota, size: int, left: int
) -> None:
    with Ledger(new_url(migrated=True), now=clock, reply_quota=quota) as ledger:
        books, other = Books(ledger, top_up=10**9), Books(ledger, name="B", top_up=10**9)
        ledger.settle([settled(other, "other", stored(expires_at=clock.now + 999))])
        for number in range(40):
            clock.now += 1
            one = stored(f"resp_{number:02}", b"x" * size, clock.now + 999)
            ledger.settle([settled(books, f"r{number:02}", one)])
        kept = [number for number in range(40) if find(books, f"resp_{number:02}")]
        assert kept[-left:] == list(range(40 - left, 40))
        assert len(kept) <= left + left // 16 + 1
        assert find(other) is not None


def test_responses_in_the_background_count_towards_the_quota_from_their_begin(new_url: Any, clock: Clock) -> None:
    with Ledger(new_url(migrated=True), now=clock, reply_quota=ReplyQuota(100, 1600)) as ledger:
        books = Books(ledger, top_up=10**9)
        for number in range(40):  # none is ever settled as complete
            clock.now += 1
            one = stored(f"resp_{number:02}", b"x" * 100, clock.now + 999)
            ledger.run(BeginResponse(books.account_id, one))
            ledger.run(EndResponse(books.account_id, one))
        kept = [number for number in range(40) if find(books, f"resp_{number:02}")]
        assert kept[-16:] == list(range(24, 40))
        assert len(kept) <= 18
        with pytest.raises(InvalidValue):
            ledger.run(BeginResponse(books.account_id, stored(body=b"x" * (MAX_BODY + 1))))
