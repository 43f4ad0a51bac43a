"""The address of a request's client, and the networks from which an API key may be used.

An IPv4 address in IPv6 notation (::ffff:192.0.2.1) counts as IPv4, and so does a network of such addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network
from typing import Any, Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

FORWARDED: Final = "forwarded"  # used instead of an address that the client may have invented
_MAPPED: Final = IPv6Network("::ffff:0:0/96")


def address_in(text: str) -> Address | None:
    """Parses a client's address, which may have a port or a zone. Returns None if the address is not valid."""
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
    """Returns the networks that this release can read. Others, which a later release wrote, allow nothing."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(network_in(text))
    return tuple(found)


def client_address(peer: str | None, forwarded_for: Iterable[str], trusted_proxies: int) -> str:
    """Returns the address of `client_host` without a port.

    For IPv6, returns the /64 network, because one client usually has a whole /64. Returns FORWARDED when `client_host`
    does, and "unknown" for an invalid address.
    """
    host = client_host(peer, forwarded_for, trusted_proxies)
    return host if host == FORWARDED else _network(host)


def client_host(peer: str | None, forwarded_for: Iterable[str], trusted_proxies: int) -> str:
    """Returns the address from which a request comes, possibly with a port. The sender cannot choose it.

    `peer` is the connection's other end as the server sees it. `forwarded_for` has the values of `x-forwarded-for` in
    order. `trusted_proxies` is the number of proxies in front of this process that append to that header. The outermost
    of them wrote the entry with the client's address. Ray Serve's own HAProxy does not write the header and is not
    counted. A Kubernetes ingress or a cloud load balancer in front writes it and is counted.

    Without trusted proxies, the client can send any `x-forwarded-for`, and uvicorn may have taken `peer` from that
    header. Uvicorn does so for connections from this machine, including HAProxy's. Uvicorn and this function split the
    header differently, so this function cannot tell whether `peer` comes from it. Therefore all requests with the
    header count as one address, FORWARDED.
    """
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",") if hop.strip()]
    if not hops:
        return peer or ""
    return hops[max(0, len(hops) - trusted_proxies)] if trusted_proxies else FORWARDED


def _network(text: str) -> str:
    address = address_in(text)
    if address is None:
        return "unknown"
    return str(address) if isinstance(address, IPv4Address) else str(ip_network((address, 64), strict=False))
