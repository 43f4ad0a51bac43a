"""Client addresses, and the networks from which an API key may be used.

An IPv4 address in IPv6 notation (::ffff:192.0.2.1) counts as IPv4, and so does a network of such addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network
from typing import Any, Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_MAPPED: Final = IPv6Network("::ffff:0:0/96")


def address_in(text: str) -> Address | None:
    """Returns the address in a connection's text or an `x-forwarded-for`, or None. It may have a port or a zone."""
    host = text.strip()
    if host.startswith("["):
        host, closed, port = host[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            return None
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def network_in(text: Any) -> Network:
    """Returns the network in user input: an address or a CIDR network. Raises ValueError with the accepted form."""
    try:
        if not isinstance(text, str) or "%" in text:
            raise ValueError
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a valid address or network: use one like 203.0.113.7, 10.0.0.0/8 or 2001:db8::/48"
        ) from None
    address = ip_interface(text).ip
    if address != network.network_address:
        raise ValueError(f"{text!r} is an address within a network: write {network} to allow all of it, or {address}")
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - _MAPPED.prefixlen))
    return network


def allowed_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Returns the networks that this release can read. Others, from a later release, allow nothing."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(network_in(text))
    return tuple(found)
