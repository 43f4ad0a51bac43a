"""An address is the same however it is written, and a network says what it allows."""

from __future__ import annotations

import pytest

from serve_app.contracts.addresses import address_in, allowed_networks, client_address, network_in


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:4711", "192.0.2.1"),
        (" 192.0.2.1 ", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("[::ffff:192.0.2.1]:4711", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("[2001:db8::1", None),
        ("[2001:db8::1]4711", None),
        ("[[2001:db8::1]", None),
        ("forwarded", None),
        ("unknown", None),
        ("", None),
        ("192.0.2", None),
        ("192.0.2.1, 10.0.0.1", None),
    ],
)
def test_an_address_is_found_in_what_connections_and_proxies_name(text: str, address: str | None) -> None:
    assert address_in(text) == (None if address is None else address_in(address))
    assert address is None or str(address_in(text)) == address


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("203.0.113.7", "203.0.113.7/32"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:DB8:0::/48", "2001:db8::/48"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::/0", "::/0"),
    ],
)
def test_a_network_has_one_text(text: str, canonical: str) -> None:
    assert str(network_in(text)) == canonical
    assert network_in(canonical) == network_in(text)


def test_a_network_that_a_later_release_wrote_allows_nothing_and_spoils_nothing() -> None:
    assert [str(one) for one in allowed_networks(["example.com", "10.0.0.0/8", ""])] == ["10.0.0.0/8"]


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "trusted", "address"),
    [
        ("192.0.2.1", [], 0, "192.0.2.1"),
        ("192.0.2.1", [" , "], 0, "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.1"], 0, "forwarded"),  # any client can write this
        ("198.51.100.1", ["10.0.0.1, 198.51.100.1"], 0, "forwarded"),  # and the server took the address from it
        ("198.51.100.1:80", ["[198.51.100.1:80]"], 0, "forwarded"),
        (None, [], 0, "unknown"),
        ("not an address", [], 0, "unknown"),
        ("10.0.0.9", [], 1, "10.0.0.9"),  # not through the proxy
        ("10.0.0.9", ["6.6.6.6, 198.51.100.1"], 1, "198.51.100.1"),
        ("10.0.0.9", ["6.6.6.6", "198.51.100.1"], 1, "198.51.100.1"),
        ("10.0.0.9", ["6.6.6.6, 198.51.100.1, 10.0.0.8"], 2, "198.51.100.1"),
        (
            "10.0.0.9",
            ["198.51.100.1"],
            2,
            "198.51.100.1",
        ),  # past the outer proxy: the inner proxy has written everything
        ("10.0.0.9", ["198.51.100.1:4711"], 1, "198.51.100.1"),
        ("10.0.0.9", ["[2001:db8:1:2::3]:4711"], 1, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:aaaa::1", [], 0, "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", [], 0, "192.0.2.1"),
        ("fe80::1%eth0", [], 0, "fe80::/64"),
        ("10.0.0.9", [" , "], 1, "10.0.0.9"),
    ],
)
def test_the_address_that_counts_is_one_that_a_client_can_not_choose(
    peer: str | None, forwarded_for: list[str], trusted: int, address: str
) -> None:
    assert client_address(peer, forwarded_for, trusted) == address
