"""Leases of limiter shards, and posted holds, as rows of the ledger."""

from __future__ import annotations

import json

from sqlalchemy import select, update

from serve_app.accounting.limiter_leases import KEPT_S, LOOK_S, LeaseWatch
from serve_app.accounting.schema import limiter_holds
from serve_app.contracts.commands import Blocker, HoldLease, LeaseState, PostHolds, ReleaseLease
from serve_app.contracts.limiting import OpenHold

from .books import Books, Clock


def hold(request_id: str, account_id: str = "acct") -> OpenHold:
    return OpenHold(request_id, account_id, "k", 700, 150, 2, 5, 100, "backend", "once")


def ask(holder: str = "a", shard: int = 0, shards: int = 1, **more: object) -> HoldLease:
    return HoldLease(shard, shards, holder, 20.0, **more)  # type: ignore[arg-type]


def test_a_lease_is_renewed_by_its_holder_alone_until_it_is_released(books: Books) -> None:
    run = books.ledger.run
    assert run(ask()) == LeaseState(1)
    assert run(ask()) == LeaseState(1, 1)
    assert run(ask("b", waiting=3)) == LeaseState(None, blockers=(Blocker(1, 1, "a", 20.0),))
    assert run(ask()) == LeaseState(1, 2, wanted=3)
    assert run(ask()) == LeaseState(1, 3)
    assert run(ReleaseLease(1, {"g/0": (hold("r"),)}))
    assert run(ask("b")) == LeaseState(2, holds=(hold("r"),))
    assert run(ask("a")).blockers == (Blocker(2, 0, "b", 20.0),)
    assert not run(ReleaseLease(1, {})), "the epoch that has ended"
    assert run(ask("b")).epoch == 2


def test_only_the_very_lease_that_was_seen_is_taken_over(books: Books) -> None:
    run = books.ledger.run
    run(ask())
    run(ask())
    assert run(ask("b", over=((1, 0),))).epoch is None, "it was renewed meanwhile"
    assert run(ask("b", ended=(7,))).epoch is None
    assert run(ask("b", over=((1, 1),))).epoch == 2
    assert run(ask("c", ended=(2,))).epoch == 3


def test_a_lease_of_another_number_of_shards_blocks_and_goes(books: Books) -> None:
    run = books.ledger.run
    assert run(ask()).epoch == 1
    assert run(ask("b", 2, 3)).blockers == (Blocker(1, 0, "a", 20.0),)
    run(ReleaseLease(1, {}))
    assert [run(ask(f"b{shard}", shard, 3)).epoch for shard in range(3)] == [2, 3, 4]
    assert [one.epoch for one in run(ask("a")).blockers] == [2, 3, 4]


def test_an_owner_posts_all_of_its_holds_each_time(books: Books) -> None:
    run = books.ledger.run
    run(PostHolds("g1/0", (hold("r1"), hold("r2"))))
    run(PostHolds("g2/0", (hold("r3"),)))
    run(PostHolds("g1/0", (hold("r2"),)))
    assert {one.request_id for one in run(ask()).holds} == {"r2", "r3"}
    run(PostHolds("g3/0", (hold("r3"),)))  # it has taken over what a dead gateway left
    run(PostHolds("g2/0", ()))
    assert {one.request_id for one in run(ask()).holds} == {"r2", "r3"}


def test_a_hold_that_a_later_release_has_posted_is_read(books: Books) -> None:
    books.ledger.run(PostHolds("g/0", (hold("r1"),)))
    with books.ledger._database.transaction() as transaction:
        [terms] = transaction.connection.execute(select(limiter_holds.c.terms)).scalars()
        newer = json.dumps(json.loads(terms) | {"colour": 7})
        transaction.connection.execute(update(limiter_holds).values(terms=newer))
    assert books.ledger.run(ask()).holds == (hold("r1"),)


def test_a_settlement_removes_what_is_posted_of_its_request(books: Books) -> None:
    run = books.ledger.run
    run(PostHolds("g/0", (hold("r1"), hold("r2"))))
    books.ledger.settle([books.settlement("r1")])
    assert run(ask()).holds == (hold("r2"),)
    run(PostHolds("g/0", (hold("r1"), hold("r2"))))
    assert run(ask()).holds == (hold("r2"),), "what is settled already is not posted again"
    books.ledger.settle([books.settlement("r2", account_id="acct_other")])
    assert run(ask()).holds == (hold("r2"),), "a settlement that was refused"


def test_a_row_whose_gateway_is_gone_is_removed_after_an_hour(timed: Books, clock: Clock) -> None:
    timed.ledger.run(PostHolds("g/0", (hold("r"),)))
    clock.now += KEPT_S - 1
    assert timed.ledger.run(ask()).holds == (hold("r"),)
    clock.now += 2
    renewed = timed.ledger.run(ask())
    assert (renewed.epoch, renewed.holds) == (1, ()), "also while the same limiter holds the lease"


def test_only_time_in_which_the_ledger_was_seen_counts_for_a_lease_of_others() -> None:
    now = 100.0
    watch = LeaseWatch(lambda: now)
    blocked = LeaseState(None, blockers=(Blocker(1, 4, "a", 20.0),))

    def over() -> tuple[tuple[int, int], ...]:
        return watch.with_over(ask("b")).over

    watch.look(ask("b"), blocked)
    now += 60
    assert over() == ()
    watch.look(ask("b"), blocked)
    for _ in range(18):
        assert over() == ()
        now += 1
        watch.look(ask("b"), blocked)
    assert over() == ((1, 4),), f"18 s, and {LOOK_S} s of the time between the first two looks"


def test_the_time_since_a_renewal_of_ones_own_service_counts_in_full() -> None:
    now = 100.0
    watch = LeaseWatch(lambda: now)
    watch.look(ask("a"), LeaseState(1, 4))
    now += 19.9
    assert watch.with_over(ask("a2")).over == ()
    now += 0.2
    assert watch.with_over(ask("a2")).over == ((1, 4),)
