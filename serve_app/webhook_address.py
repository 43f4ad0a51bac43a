"""Resolves a webhook's address. Account holders choose it, so it must not lead into the service's own network.

The name is resolved once, and the connection goes to the resolved address. A later change of the name has no effect.
Account holders must not learn how a name resolves here, because it may be a name of the service's own network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Final

import httpx

logger = logging.getLogger("ray.serve")

_PORTS: Final = {"https": 443, "http": 80}
#: The only message about how a host name resolves. It does not differ by cause, so that it reveals nothing.
UNUSABLE: Final = "this address can't be used: give the https address of a host with public addresses only, at port 443"
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # no address outside it is public
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Python counts these as public, but they lead to machines of the provider or the network.
_SPECIAL: Final = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # network protocols; Oracle's metadata service is at 192.0.0.192
        "168.63.129.16/32",  # Azure's agent
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # network protocols
        "3fff::/20",  # for documentation
    )
]


class BadAddress(Exception):
    """A webhook may not use this address. The message is for the account's holder, without details of the network."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL to call, with a resolved IP address. `headers` and `extensions` carry the original host name."""

    url: httpx.URL
    headers: dict[str, str]
    extensions: dict[str, str]


async def pinned(target: str, *, private: bool) -> Address:
    """Resolves `target`. Raises BadAddress. `private` allows http, any port, and addresses that are not public."""
    try:
        url = httpx.URL(target)
        host = url.host
    except (httpx.InvalidURL, UnicodeError):
        raise BadAddress(UNUSABLE) from None
    if url.scheme not in _PORTS or not host or url.userinfo:
        raise BadAddress("use an https URL without a user name")
    if url.scheme != "https" and not private:
        raise BadAddress("use an https URL")
    port = _PORTS[url.scheme] if url.port is None else url.port
    if port != _PORTS[url.scheme] and not private:
        raise BadAddress("use port 443, the default of https")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        logger.warning("a webhook's address is refused: %r can't be resolved: %s", host, error)
        raise BadAddress(UNUSABLE) from None
    addresses = [str(one[4][0]) for one in found]
    if not private and (hidden := [one for one in addresses if not _is_public(one)]):
        logger.warning("a webhook's address is refused: %r leads to %s, which is not public", host, hidden[0])
        raise BadAddress(UNUSABLE)
    return Address(url.copy_with(host=addresses[0]), {"host": url.netloc.decode()}, {"sni_hostname": host})


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:  # in a network without IPv4, a name server answers with such an address
            return _is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found not in _UNICAST or (found.sixtofour and not _is_public(str(found.sixtofour))):
            return False
    special = any(found in network for network in _SPECIAL)
    return found.is_global and not (special or found.is_multicast)
