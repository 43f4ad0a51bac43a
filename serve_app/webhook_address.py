"""Where a webhook really leads. Account holders name the address: it must not lead into the service's own network.

The name is resolved once, and the connection goes to what was found: a name that changes in between leads nowhere else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final

import httpx

_PORTS: Final = {"https": 443, "http": 80}


class BadAddress(Exception):
    """A webhook may not lead there."""


@dataclass(frozen=True, slots=True)
class Address:
    """What to ask, at an address of the network; `headers` and `extensions` name the machine that is meant."""

    url: httpx.URL
    headers: dict[str, str]
    extensions: dict[str, str]


async def pinned(target: str, *, private: bool) -> Address:
    """Raises BadAddress. `private` allows http and addresses that are not public."""
    try:
        url = httpx.URL(target)
    except httpx.InvalidURL as error:
        raise BadAddress(f"{target!r} is no address: {error}") from None
    if url.scheme not in _PORTS or not url.host or url.userinfo:
        raise BadAddress(f"{target!r}: give an https address without a user's name")
    if url.scheme != "https" and not private:
        raise BadAddress(f"{target!r}: give an https address")
    port = url.port or _PORTS[url.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadAddress(f"{url.host} can't be resolved: {error}") from None
    addresses = [str(one[4][0]) for one in found]
    if not private and (hidden := [one for one in addresses if not _is_public(one)]):
        raise BadAddress(f"{url.host} leads to {hidden[0]}, which is not public")
    return Address(url.copy_with(host=addresses[0]), {"host": url.netloc.decode()}, {"sni_hostname": url.host})


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    return found.is_global and not found.is_multicast and (inner is None or inner.is_global)
