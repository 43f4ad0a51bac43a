"""An address is the same however it is written, and a network says what it allows."""

from __future__ import annotations

import pytest

from serve_app.contracts.addresses import address_in, allowed_networks, network_in


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
