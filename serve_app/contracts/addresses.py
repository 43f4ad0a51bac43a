"""Addresses of clients, and the networks that an API key may be used from.

An IPv4 address that is written as an IPv6 one (::ffff:192.0.2.1) counts as IPv4, and so does a network of these.
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
    """The address in the text of a connection or an `x-forwarded-for`, which may have a port or a zone; else None."""
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
    """The network that somebody has written: an address, or a CIDR network. Raises ValueError with what to write."""
    try:
        if not isinstance(text, str) or "%" in text:
            raise ValueError
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text!r} is no address or network: write one like 203.0.113.7, 10.0.0.0/8 or 2001:db8::/48"
        ) from None
    address = ip_interface(text).ip
    if address != network.network_address:
        raise ValueError(f"{text!r} is an address within a network: write {network} to allow all of it, or {address}")
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - _MAPPED.prefixlen))
    return network


def allowed_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Those of these networks that this release can read: others, of a later one, allow nothing."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(network_in(text))
    return tuple(found)
