"""How often the keys that come from one address may turn out wrong, before they are refused without looking them up.

A key that is right is never refused for what others behind the same address send: a key that is known is not asked
about here at all, and one that is not known yet has a way in that guesses have not: it comes again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, Final

from serve_app.limits import Bucket

FREE: Final = 20  # wrong keys of one address in a minute
# As many look-ups more are for keys that come a second time. Guessing gives no reason to send a key twice; a client
# whose neighbour guesses was told to come back, and does.
SECOND_TIME: Final = 10
WRONG_FOR_S: Final = 60.0  # a key that the ledger did not know is not looked up again for so long
MOST_ADDRESSES: Final = 10_000
MOST_KEYS: Final = 20_000  # of each kind: about 4 MB
_ROUNDING: Final = 1e-6  # of a key


class Verdict(Enum):
    """What to do with a key that is not known."""

    LOOK_UP = auto()  # and tell by `looked_up` what came of it
    WAIT = auto()  # for the look-ups of this address that are in flight: how they end decides
    WRONG = auto()  # it was looked up a moment ago: 401
    REFUSE = auto()  # 429


class _Address:
    """Wrong keys as a bucket that drains `FREE` of them a minute, and look-ups whose end is not known yet."""

    __slots__ = ("bucket", "in_flight")

    def __init__(self) -> None:
        self.bucket = Bucket(FREE)
        self.in_flight = 0


class WrongKeys:
    """One gateway's memory of wrong keys: bounded, the longest unused is forgotten first. Does no I/O.

    `clock` gives seconds and never runs backwards.
    """

    def __init__(
        self, clock: Callable[[], float], *, most_addresses: int = MOST_ADDRESSES, most_keys: int = MOST_KEYS
    ) -> None:
        self._clock = clock
        self._most_addresses = most_addresses
        self._most_keys = most_keys
        self._addresses: dict[str, _Address] = {}
        self._right: dict[str, None] = {}  # digests, as all that follow
        self._wrong: dict[str, float] = {}  # until when it is taken for wrong
        self._refused: dict[str, None] = {}  # unseen: the next time is its second

    def verdict(self, address: str, digest: str) -> Verdict:
        """What to do with a key that the limiter does not know. LOOK_UP counts until `looked_up` is called."""
        now = self._clock()
        if self._wrong.get(digest, 0.0) > now:
            return Verdict.WRONG
        known = self._address(address)
        if digest in self._right:
            # The limiter has forgotten it, by a restart: that must not cost its owner anything.
            known.in_flight += 1
            return Verdict.LOOK_UP
        bound = FREE + SECOND_TIME if digest in self._refused else FREE
        room = bound - known.bucket.used(now) + _ROUNDING
        if room >= known.in_flight + 1:
            known.in_flight += 1
            return Verdict.LOOK_UP
        if room >= 1:
            return Verdict.WAIT
        _remember(self._refused, digest, None, self._most_keys)
        return Verdict.REFUSE

    def looked_up(self, address: str, digest: str, wrong: bool) -> None:
        """Ends what LOOK_UP began: the key is wrong, or it is right or could not be looked up."""
        known = self._address(address)
        known.in_flight = max(0, known.in_flight - 1)
        if not wrong:
            return
        now = self._clock()
        known.bucket.charge(now, known.bucket.cost_s(1))
        self._right.pop(digest, None)
        _remember(self._wrong, digest, now + WRONG_FOR_S, self._most_keys)

    def right(self, digest: str) -> None:
        """A key has let a request in: it may be looked up whenever the limiter has forgotten it."""
        if digest not in self._right:
            _remember(self._right, digest, None, self._most_keys)

    def count(self, address: str) -> float:
        """Counts a key that is wrong without a look-up; 0, or the seconds to wait when there were too many."""
        known = self._address(address)
        now = self._clock()
        if known.bucket.used(now) + 1 > FREE + _ROUNDING:
            return self.wait_s(address)
        known.bucket.charge(now, known.bucket.cost_s(1))
        return 0.0

    def wait_s(self, address: str) -> float:
        """Seconds until another wrong key of this address would be answered as one; 1 to 60."""
        bucket = self._address(address).bucket
        over = bucket.used(self._clock()) + 1 - FREE
        return min(60.0, max(1.0, bucket.cost_s(over))) if over > 0 else 1.0

    @property
    def addresses(self) -> int:
        """How many are remembered."""
        return len(self._addresses)

    def _address(self, address: str) -> _Address:
        known = self._addresses.pop(address, None) or _Address()
        _remember(self._addresses, address, known, self._most_addresses)
        return known


def _remember(table: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Puts `key` at the end, and drops from the front what is too much."""
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]


def client_address(peer: str | None, forwarded_for: Iterable[str], trusted_proxies: int) -> str:
    """Where a request comes from, as far as it can't be chosen by who sends it; IPv6 by its /64, which one client has.

    `peer` is the connection's other end as the server tells it, `forwarded_for` the values of `x-forwarded-for` in
    their order. `trusted_proxies` is how many proxies before this process append to that header: the client is the
    entry which the outermost of them has written. Ray Serve's own HAProxy does not write it and is not counted; a
    Kubernetes ingress or a cloud balancer in front does.

    Without trusted proxies the header is whatever the client has written, and uvicorn may have taken `peer` from it
    (it does so for connections from this machine, HAProxy's among them). All such requests count as one address.
    """
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",") if hop.strip()]
    if trusted_proxies and hops:
        return _network(hops[max(0, len(hops) - trusted_proxies)])
    if not peer:
        return "unknown"
    network = _network(peer)
    return "forwarded" if any(_network(hop) == network for hop in hops) else network


def _network(text: str) -> str:
    host = text.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
