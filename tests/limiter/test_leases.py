"""Leases: a hold lives as long as its gateway, and a restarted limiter learns of it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.contracts.limiting import OpenHold, Recovering, Renew
from tests.limiter.world import CONTRACT, OUTPUT_PRICE, PROMPT_PRICE, World


def test_a_holder_that_stops_renewing_loses_its_holds_and_slots() -> None:
    world = World()
    world.grant("dead", holder="g1")
    world.grant("alive", holder="g2")
    world.now += 6
    assert world.admission.renew(Renew("g2", ("alive",))) == ()
    world.now += 5
    assert world.admission.expire() == ["dead"]
    assert world.admission.status("a").open_requests == 1
    assert world.admission.expire() == []


def test_a_hold_that_its_gateway_no_longer_names_expires_although_the_gateway_lives() -> None:
    """The gateway lives, but the release was lost."""
    world = World()
    world.grant("lost")
    for _ in range(3):
        world.now += 5
        world.admission.renew(Renew("g", ()))
    assert world.admission.expire() == ["lost"]


def test_renew_names_what_is_unknown_and_announcing_it_restores_it() -> None:
    world = World()
    grant = world.grant("r", 100, 50)
    world.now += 20
    world.admission.expire()
    assert world.admission.renew(Renew("g", ("r",))) == ("r",)
    open_hold = OpenHold("r", "a", "k", grant.hold, grant.tokens_charged, PROMPT_PRICE, OUTPUT_PRICE, 50)
    for _ in range(3):
        world.admission.announce(open_hold, "g")
    assert world.admission.status("a").held == grant.hold
    assert world.admission.status("a").open_requests == 1
    assert world.admission.renew(Renew("g", ("r",))) == ()


def test_another_holder_cannot_renew_but_can_take_over_by_announcing() -> None:
    world = World()
    grant = world.grant("r", holder="g1")
    assert world.admission.renew(Renew("g2", ("r",))) == ("r",)
    world.admission.announce(OpenHold("r", "a", "k", grant.hold, 0, PROMPT_PRICE, OUTPUT_PRICE, 50), "g2")
    assert world.admission.renew(Renew("g2", ("r",))) == ()
    assert world.admission.status("a").open_requests == 1


def test_leases_that_are_renewed_out_of_order_expire_in_their_own_order() -> None:
    world = World()
    for n in range(5):
        world.grant(f"r{n}")
        world.now += 1
    world.admission.renew(Renew("g", ("r3", "r0")))
    world.now += 8
    assert world.admission.expire() == ["r1", "r2"]
    world.now += 1.5
    assert world.admission.expire() == ["r4"]
    world.now += 1
    assert world.admission.expire() == ["r3", "r0"]


def test_recovery_ends_by_itself_and_announced_requests_are_known_in_it() -> None:
    world = World(recovery_s=3.0, tpm=600)
    world.admission.announce(OpenHold("r", "a", "k", 700, 150, PROMPT_PRICE, OUTPUT_PRICE, 100), "g")
    assert world.ask("r").hold == 700, "asked again for an open request, it answers its grant"
    world.now += 1
    assert world.ask("new") == Recovering("new", 2.0)
    world.now += 2
    assert world.grant("new").tokens.remaining == 600 - (150 - 30) - 200, "30 have drained in 3 s"


@pytest.mark.parametrize("own", [100, 600_000])
def test_announced_requests_count_at_the_accounts_own_limit_once_it_is_known(own: int) -> None:
    world = World()
    open_hold = OpenHold("1", "a", "k", 1000, 100_000, PROMPT_PRICE, OUTPUT_PRICE, 100)
    for contract in (CONTRACT, replace(CONTRACT, tpm=own)):
        world.contract = contract
        world.restart()
        world.admission.announce(open_hold, "g")
        world.account(tpm=own)
        world.key()
        assert world.admission._accounts["a"].tokens[0].used(world.now) == pytest.approx(100_000), contract
        world.end("1", 100, 100)
        assert world.admission._accounts["a"].tokens[0].used(world.now) == pytest.approx(200), contract


def test_an_announced_hold_is_released_like_any_other() -> None:
    world = World(balance=1000)
    world.admission.announce(OpenHold("r", "a", "k", 700, 150, PROMPT_PRICE, OUTPUT_PRICE, 100), "g")
    world.end("r", 100, 20, balance=700, version=2)
    assert (world.admission.status("a").held, world.admission.status("a").open_requests) == (0, 0)
    assert world.windows()[1] == 60_000 - 120
