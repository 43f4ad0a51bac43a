"""Resolves a webhook's address. Account holders choose it, so it must not lead into the service's own network.

The name is resolved once, and the connection goes to the resolved address. A later change of the name has no effect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final

import httpx

_PORTS: Final = {"https": 443, "http": 80}
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # no address outside it is public
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Python counts these as public, but they lead to machines of the provider or the network.
_SPECIAL: Final = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # network protocols; 192.0.0.192 has Oracle's metadata
        "168.63.129.16/32",  # Azure's agent
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # network protocols
        "3fff::/20",  # for documentation
    )
]


class BadAddress(Exception):
    """A webhook may not use this address."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL to call, with a resolved IP address. `headers` and `extensions` carry the original host name."""

    url: httpx.URL
    headers: dict[str, str]
    extensions: dict[str, str]


async def pinned(target: str, *, private: bool) -> Address:
    """Resolves `target`. Raises BadAddress. `private` allows http and addresses that are not public."""
    try:
        url = httpx.URL(target)
        host = url.host
    except (httpx.InvalidURL, UnicodeError) as error:
        raise BadAddress(f"{target!r} is not a valid URL: {error}") from None
    if url.scheme not in _PORTS or not host or url.userinfo:
        raise BadAddress(f"{target!r}: use an https URL without a user name")
    if url.scheme != "https" and not private:
        raise BadAddress(f"{target!r}: use an https URL")
    port = url.port or _PORTS[url.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadAddress(f"cannot resolve {host}: {error}") from None
    addresses = [str(one[4][0]) for one in found]
    if not private and (hidden := [one for one in addresses if not _is_public(one)]):
        raise BadAddress(f"{host} resolves to {hidden[0]}, which is not a public address")
    return Address(url.copy_with(host=addresses[0]), {"host": url.netloc.decode()}, {"sni_hostname": host})


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:  # the answer of a name server in a network without IPv4
            return _is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found not in _UNICAST or (found.sixtofour and not _is_public(str(found.sixtofour))):
            return False
    special = any(found in network for network in _SPECIAL)
    return found.is_global and not (special or found.is_multicast)
