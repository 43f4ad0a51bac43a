"""Decides when a key that the limiter does not know is looked up, and how its sender is answered.

Every well-formed key is looked up, whatever other senders at its address have sent. A valid key is therefore never
refused because of other clients. This matters where no proxy records addresses and many clients share one. Wrong keys
cannot exhaust the look-ups, because one query to the ledger looks up all keys that wait. After too many wrong keys
from an address, its unknown keys wait for the next beat, at most BEAT_S, and are looked up in one query. So the address
cannot raise the number of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

from serve_app.contracts.rates import Bucket

FREE: Final = 20  # wrong keys per address and minute that are answered with 401
BEAT_S: Final = 0.02  # maximum delay of a look-up for an address that has sent too many wrong keys
WRONG_FOR_S: Final = 60.0  # time during which a key that the ledger does not know is not looked up again
MAX_ADDRESSES: Final = 10_000
MAX_KEYS: Final = 20_000  # right keys, and as many wrong ones; about 4 MB each
_ROUNDING: Final = 1e-6  # tolerance for float rounding, in keys


class Verdict(Enum):
    """The handling of a key that the limiter does not know."""

    LOOK_UP = auto()  # look the key up, and report the result with `looked_up`
    LOOK_UP_AT_BEAT = auto()  # look the key up at the next beat, and report the result with `looked_up`
    WRONG = auto()  # a recent look-up did not find the key: do not look it up again


class WrongKeys:
    """One gateway's bounded memory of wrong keys, which drops the least recently used first. Does no I/O.

    `clock` returns seconds and never runs backwards.
    """

    def __init__(
        self, clock: Callable[[], float], *, most_addresses: int = MAX_ADDRESSES, most_keys: int = MAX_KEYS
    ) -> None:
        self._clock = clock
        self._most_addresses = most_addresses
        self._most_keys = most_keys
        self._addresses: dict[str, Bucket] = {}  # by address: wrong keys, which drain at `FREE` a minute
        self.right_keys: dict[str, None] = {}  # by digest
        self._wrong: dict[str, float] = {}  # by digest: time until which the key counts as wrong

    def verdict(self, address: str, digest: str) -> Verdict:
        """Returns how to handle a key that the limiter does not know."""
        if self._wrong.get(digest, 0.0) > self._clock():
            return Verdict.WRONG
        # A limiter that restarts forgets valid keys. Their owners must not be slowed down by that.
        if digest in self.right_keys or self._room(address) > 0:
            return Verdict.LOOK_UP
        return Verdict.LOOK_UP_AT_BEAT

    def looked_up(self, digest: str, wrong: bool) -> None:
        """Records the result of a look-up. `wrong` is False for a valid key and after a failed look-up."""
        if wrong:
            self.right_keys.pop(digest, None)
            _remember_bounded(self._wrong, digest, self._clock() + WRONG_FOR_S, self._most_keys)

    def right(self, digest: str) -> None:
        """Remembers a valid key. If the limiter forgets it, the next look-up does not wait for a beat."""
        _remember_bounded(self.right_keys, digest, None, self._most_keys)

    def count(self, address: str) -> float:
        """Counts a wrong key. Returns 0, or the seconds to wait after too many."""
        if self._room(address) <= 0:
            return self.wait_s(address)
        self._bucket(address).charge(self._clock(), 1)
        return 0.0

    def wait_s(self, address: str) -> float:
        """Returns the seconds, 1 to 60, until the next wrong key of this address gets a 401 again."""
        bucket = self._bucket(address)
        over = bucket.used(self._clock()) + 1 - FREE
        return min(60.0, max(1.0, bucket.cost_s(over))) if over > 0 else 1.0

    @property
    def addresses(self) -> int:
        """Number of addresses that are remembered."""
        return len(self._addresses)

    def _room(self, address: str) -> int:
        """Returns how many more wrong keys the address may send now."""
        return int(FREE - self._bucket(address).used(self._clock()) + _ROUNDING)

    def _bucket(self, address: str) -> Bucket:
        known = self._addresses.pop(address, None) or Bucket(FREE)
        _remember_bounded(self._addresses, address, known, self._most_addresses)
        return known


def _remember_bounded(table: dict[str, Any], key: str, value: Any, most: int) -> None:
    """Puts `key` at the end. Drops entries from the front while there are more than `most`."""
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]
