"""Only requests that began before the expiry may spend what has expired; nothing else is withheld for it."""

from __future__ import annotations

import pytest

from serve_app.contracts.periods import CLOCK_SKEW_S
from tests.limiter.world import NOON, OUTPUT_PRICE, PROMPT_PRICE, World

COST = 100 * PROMPT_PRICE + 100 * OUTPUT_PRICE  # of a request as `World.grant` asks for it
SOON = NOON + 60


def test_a_grant_pays_until_it_expires_and_not_afterwards() -> None:
    world = World()
    world.account(balance=COST + 30, expiring=((SOON, COST),))
    world.grant("before")
    world.end("before", refused=True)
    world.wait(60)
    assert world.grant("after", 0, 1000).hold == 30
    refusal = world.refusal("none")
    assert refusal.status == 402
    assert "balance of 0.00000003" in refusal.message


def test_a_balance_of_expired_grants_alone_is_none() -> None:
    world = World()
    world.account(balance=500, expiring=((SOON, 500),))
    world.wait(60)
    assert "no balance left (it is 0.00)" in world.refusal().message


def test_a_grant_ends_shortly_before_its_expiry_because_clocks_differ() -> None:
    world = World()
    world.account(balance=500, expiring=((SOON, 500),))
    world.wait(60 - CLOCK_SKEW_S - 0.001)
    world.grant("1", 0, 10)
    world.wait(0.01)
    assert world.refusal("2").status == 402


def test_a_request_that_began_before_the_expiry_is_paid_by_the_grant_so_new_money_is_all_free() -> None:
    world = World()
    world.account(balance=COST + 100, expiring=((SOON, COST + 100),))
    world.grant("old")
    world.wait(100)
    assert world.refusal("new").status == 402
    world.account(balance=COST + 100 + 50, version=3, expiring=((SOON, COST + 100),))
    assert world.grant("new", 0, 1000).hold == 50


def test_what_an_old_request_does_not_use_of_its_grant_stays_unusable_for_others() -> None:
    world = World()
    world.account(balance=COST, expiring=((SOON, COST),))
    world.grant("old")
    world.wait(100)
    world.end("old", 100, 10, balance=COST - 250, version=3)
    assert world.refusal("new").status == 402
    world.account(balance=COST - 250, version=3, expiring=((SOON, COST - 250),))
    assert world.refusal("new").status == 402


def test_an_old_request_may_still_grow_into_its_grant() -> None:
    world = World()
    world.account(balance=COST, expiring=((SOON, COST),))
    world.grant("old", 50, 100)
    world.wait(100)
    adjusted = world.adjust(100, "old")
    assert (adjusted.hold, adjusted.max_tokens) == (COST, 100)
    assert world.adjust(1000, "old").status == 402


def test_after_a_restart_an_old_request_is_still_paid_by_the_grant_and_new_money_is_all_free() -> None:
    world = World()
    world.account(balance=COST, expiring=((SOON, COST),))
    old = world.grant("old", 50, 100)
    began = world.at
    world.wait(100)
    world.restart()
    world.announce(old, opened_at=began)
    world.account(balance=COST + 50, expiring=((SOON, COST),))
    world.key()
    assert world.adjust(100, "old").max_tokens == 100
    assert world.grant("new", 0, 1000).hold == 50


@pytest.mark.parametrize(
    ("lots", "free"),
    [
        (((NOON + 10, 100), (NOON + 20, 1000)), 5000 - 300),
        (((NOON + 10, 700), (NOON + 20, 700)), 5000),
        (((NOON + 10, 1400), (NOON + 20, 100)), 5000 - 600),
        (((NOON + 10, 100), (NOON + 20, 100)), 5000 - 600 - 600),
        (((NOON + 10, 0), (NOON + 20, 3000)), 5000),
    ],
)
def test_rests_are_paired_with_the_requests_that_may_use_them(lots: tuple[tuple[float, int], ...], free: int) -> None:
    """One request began before both expiries and one between them; 5000 never expire."""
    world = World()
    expiring = sum(left for _, left in lots)
    world.account(balance=5000 + expiring, expiring=lots)
    assert world.grant("first").hold == 700
    world.wait(15)
    assert world.grant("second").hold == 700
    world.wait(15)
    # The greedy order: the first request takes the first rest, what is left of it and the second one the second rest.
    first, second = (left for _, left in lots)
    claimed = min(first, 700)
    claimed += min(second, 1400 - claimed)
    assert world.admission._accounts["a"].spendable(world.at) == 5000 + claimed - 1400 == free


def test_a_settlement_leaves_no_old_rest_behind() -> None:
    """It has a balance without the grants; the next change of the account has the rest."""
    world = World()
    world.account(balance=1000, version=2, expiring=((SOON, 800),))
    world.grant("1")
    world.end("1", 100, 100, balance=1000 - COST, version=3)
    world.wait(100)
    account = world.admission._accounts["a"]
    assert account.spendable(world.at) == 1000 - COST - 800, "withholds too much for a moment, never too little"
    world.account(balance=1000 - COST, version=3, expiring=((SOON, 800 - COST),))
    assert account.spendable(world.at) == 200


def test_a_state_of_an_equal_version_changes_all_but_the_balance() -> None:
    world = World()
    world.end("x", balance=77, version=5, account_id="a")
    world.account(balance=78, version=5, expiring=((SOON, 7),), rpm=3, weight=40)
    account = world.admission._accounts["a"]
    assert account.snapshot is not None
    assert (account.balance, account.snapshot.expiring, account.contract.rpm, account.contract.weight) == (
        77, ((SOON, 7),), 3, 40,
    )  # fmt: skip
    world.account(balance=77, version=5, active=False)
    assert world.refusal().status == 401
    world.account(balance=900, version=4)
    assert world.refusal().status == 401, "an older one changes nothing"


def test_an_announced_request_is_not_taken_to_have_begun_before_an_expiry() -> None:
    """Its start is not known, so too much may be withheld until it ends."""
    world = World()
    world.account(balance=COST, expiring=((SOON, COST),))
    grant = world.grant("old")
    world.wait(100)
    world.restart()
    world.announce(grant)
    world.account(balance=COST + 900, expiring=((SOON, COST),))
    world.key()
    assert world.grant("new", 0, 1000).hold == 200
    world.end("old", 100, 100, balance=900, version=3)
    world.account(balance=900, version=3)
    assert world.grant("newer", 0, 1000).hold == 700
