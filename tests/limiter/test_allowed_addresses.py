"""A key with allowed addresses lets in requests from these alone, and a refusal consumes nothing."""

from __future__ import annotations

import pytest

from serve_app.contracts.limiting import Admit, Grant, Identify, Identity, Refusal
from tests.limiter.world import World

NETWORKS = ("10.0.0.0/8", "203.0.113.7/32", "2001:db8::/48")


def bound() -> World:
    world = World()
    world.key(addresses=NETWORKS)
    return world


@pytest.mark.parametrize(
    "address",
    ["10.255.0.1", "203.0.113.7", "203.0.113.7:4711", "::ffff:10.0.0.1", "[2001:db8:0:1::2]:443", "2001:db8::1"],
)
def test_an_address_in_one_of_the_networks_is_let_in(address: str) -> None:
    world = bound()
    assert world.admission.identify(Identify("d", address=address)) == Identity("a", "k", from_anywhere=False)
    assert not world.grant(address=address).from_anywhere


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("11.0.0.1", "the address 11.0.0.1."),
        ("203.0.113.8", "the address 203.0.113.8."),
        ("::ffff:192.0.2.1", "the address 192.0.2.1."),
        ("2001:db8:1::1", "the address 2001:db8:1::1."),
        ("", "cannot determine"),  # a gateway of an earlier release sends none
        ("forwarded", "cannot determine"),
        ("10.0.0.1, 11.0.0.1", "cannot determine"),
    ],
)
def test_another_address_gets_403_which_names_it_and_nothing_changes(address: str, says: str) -> None:
    world = bound()
    before = world.everything()
    refusal = world.refusal(address=address)
    assert (refusal.status, refusal.code) == (403, "address_not_allowed")
    assert says in refusal.message
    assert (refusal.account_id, refusal.key_id, refusal.from_anywhere) == ("a", "k", False)
    answer = world.admission.identify(Identify("d", address=address))
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.message) == (403, refusal.message)
    assert world.everything() == before
    assert world.admission.knows("d"), "it is looked up no more"


def test_a_key_without_addresses_is_let_in_from_anywhere_also_by_a_gateway_that_sends_no_address() -> None:
    world = World()
    for number, address in enumerate(("", "forwarded", "11.0.0.1")):
        assert world.grant(str(number), address=address).from_anywhere
    assert Admit("r", "g", "d", "m", 1, 1, 1, 1).address == ""


def test_a_key_whose_addresses_nobody_can_read_is_let_in_from_nowhere() -> None:
    world = World()
    for version, addresses in enumerate(((), ("example.com",)), start=2):
        world.key(version=version, addresses=addresses)
        assert world.refusal(address="10.0.0.1").status == 403


def test_addresses_that_are_changed_count_for_the_next_request_and_not_for_one_that_runs() -> None:
    world = World()
    grant = world.grant("before", address="11.0.0.1")
    world.key(version=3, addresses=NETWORKS)
    assert world.refusal("after", address="11.0.0.1").status == 403
    assert world.ask("before", address="11.0.0.1") == grant, "the same request, asked about again"
    world.key(version=4)
    assert isinstance(world.ask("last", address="11.0.0.1"), Grant)


def test_403_comes_after_401_and_before_anything_else() -> None:
    world = World(balance=0)
    world.key(active=False, addresses=NETWORKS)
    assert world.refusal(address="11.0.0.1").status == 401
    world.key(version=3, addresses=NETWORKS, models=())
    assert world.refusal(address="11.0.0.1").status == 403
    refusal = world.refusal(address="10.0.0.1")
    assert (refusal.status, refusal.from_anywhere) == (422, False), "other refusals also say that the address counts"
