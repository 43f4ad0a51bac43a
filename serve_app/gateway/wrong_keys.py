"""What a key costs that the limiter does not know: when it is looked up, and what its sender is answered.

Every well-formed key is looked up, whatever others at its address have sent, so that a right key is never refused for
what a neighbour does: many addresses are one where no proxy writes them down. Look-ups can't be used up, because one
query to the ledger answers for all keys that wait. An address that has sent too many wrong keys has its next unknown
keys looked up at the next beat, all in one query, so that it can't choose how many queries there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from ipaddress import IPv4Address, ip_network
from typing import Any, Final

from serve_app.contracts.addresses import address_in
from serve_app.contracts.rates import Bucket

FREE: Final = 20  # wrong keys of one address in a minute that are answered with 401
BEAT_S: Final = 0.02
WRONG_FOR_S: Final = 60.0  # a key that the ledger did not know is not looked up again for so long
MAX_ADDRESSES: Final = 10_000
MAX_KEYS: Final = 20_000  # of each kind: about 4 MB
FORWARDED: Final = "forwarded"  # in place of an address that the client may have written itself
_ROUNDING: Final = 1e-6  # of a key


class Verdict(Enum):
    """What to do with a key that is not known."""

    LOOK_UP = auto()  # and report the result with `looked_up`
    LOOK_UP_AT_BEAT = auto()  # as well, together with all others of the next BEAT_S
    WRONG = auto()  # it was looked up a moment ago


class WrongKeys:
    """One gateway's memory of wrong keys: bounded, the longest unused is forgotten first. Does no I/O.

    `clock` gives seconds and never runs backwards.
    """

    def __init__(
        self, clock: Callable[[], float], *, most_addresses: int = MAX_ADDRESSES, most_keys: int = MAX_KEYS
    ) -> None:
        self._clock = clock
        self._most_addresses = most_addresses
        self._most_keys = most_keys
        self._addresses: dict[str, Bucket] = {}  # wrong keys; drains `FREE` of them a minute
        self.right_keys: dict[str, None] = {}  # digests, as those that follow
        self._wrong: dict[str, float] = {}  # until when it is taken for wrong

    def verdict(self, address: str, digest: str) -> Verdict:
        """What to do with a key that the limiter does not know."""
        if self._wrong.get(digest, 0.0) > self._clock():
            return Verdict.WRONG
        # A right key that the limiter has forgotten, by a restart: that must not cost its owner anything.
        if digest in self.right_keys or self._room(address) > 0:
            return Verdict.LOOK_UP
        return Verdict.LOOK_UP_AT_BEAT

    def looked_up(self, digest: str, wrong: bool) -> None:
        """The result of a look-up: the key is wrong, or it is right or could not be looked up."""
        if wrong:
            self.right_keys.pop(digest, None)
            _remember_bounded(self._wrong, digest, self._clock() + WRONG_FOR_S, self._most_keys)

    def right(self, digest: str) -> None:
        """A key has let a request in: it is looked up at once whenever the limiter has forgotten it."""
        _remember_bounded(self.right_keys, digest, None, self._most_keys)

    def count(self, address: str) -> float:
        """Counts a wrong key; 0, or the seconds to wait when there were too many."""
        if self._room(address) <= 0:
            return self.wait_s(address)
        self._bucket(address).charge(self._clock(), 1)
        return 0.0

    def wait_s(self, address: str) -> float:
        """Seconds until another wrong key of this address would be answered as one; 1 to 60."""
        bucket = self._bucket(address)
        over = bucket.used(self._clock()) + 1 - FREE
        return min(60.0, max(1.0, bucket.cost_s(over))) if over > 0 else 1.0

    @property
    def addresses(self) -> int:
        """How many are remembered."""
        return len(self._addresses)

    def _room(self, address: str) -> int:
        """How many more wrong keys the address may send now."""
        return int(FREE - self._bucket(address).used(self._clock()) + _ROUNDING)

    def _bucket(self, address: str) -> Bucket:
        known = self._addresses.pop(address, None) or Bucket(FREE)
        _remember_bounded(self._addresses, address, known, self._most_addresses)
        return known


def _remember_bounded(table: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Puts `key` at the end, and drops from the front what is too much."""
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]


def client_address(peer: str | None, forwarded_for: Iterable[str], trusted_proxies: int) -> str:
    """As `client_host`, with one text for each client: IPv6 by its /64, which one client has."""
    host = client_host(peer, forwarded_for, trusted_proxies)
    return host if host == FORWARDED else _network(host)


def client_host(peer: str | None, forwarded_for: Iterable[str], trusted_proxies: int) -> str:
    """Where a request comes from, as far as it can't be chosen by who sends it, as text that may have a port.

    `peer` is the connection's other end as the server sees it, `forwarded_for` the values of `x-forwarded-for` in
    their order. `trusted_proxies` is how many proxies before this process append to that header: the client is the
    entry which the outermost of them has written. Ray Serve's own HAProxy does not write it and is not counted; a
    Kubernetes ingress or a cloud balancer in front does.

    Without trusted proxies the client writes the header as it likes, and uvicorn may have taken `peer` from it (it does
    so for connections from this machine, HAProxy's among them). All requests with the header count as one address:
    whether `peer` is one of its entries can't be told, because uvicorn takes them apart in its own way.
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
