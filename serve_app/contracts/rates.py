"""A rate limit as a single timestamp: the generic cell rate algorithm with weights, refunds and debt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Final

WINDOW_S: Final = 60.0
_SLACK_S: Final = 1e-6  # tolerance for float rounding; it does not add up over requests


class Bucket:
    """A limit of `limit` units in each window, a minute by default, with a burst of one window's worth.

    The state is the theoretical arrival time: the moment at which all charges so far have drained. The time until then
    is the part of the window in use. Costs are in seconds too. A change of the limit therefore keeps the part in use: a
    half-full bucket stays half full.

    Source: ITU-T I.371 annex A, virtual scheduling, with an increment in proportion to each cell's cost. Times are
    seconds of any one clock that never runs backwards. Counts are exact up to ten million units a minute.
    """

    __slots__ = ("limit", "tat", "window_s")

    def __init__(self, limit: int, window_s: float = WINDOW_S) -> None:
        self.limit = limit
        self.window_s = window_s
        self.tat = -inf

    def cost_s(self, units: float) -> float:
        """Returns the seconds that `units` take to drain; infinity at a limit of 0, which grants nothing."""
        return units * self.window_s / self.limit if self.limit > 0 else inf

    def wait_s(self, now: float, units: float) -> float:
        """Returns the seconds until `units` fit, 0 if they fit now. Changes nothing.

        More units than the whole limit never fit. They are granted when nothing else is in use, and put the bucket into
        debt. One large request is therefore delayed and counted in full, but not refused forever.
        """
        if self.limit <= 0:
            return inf
        room_s = self.window_s - units * self.window_s / self.limit
        wait = self.tat - now - (room_s if room_s > 0.0 else 0.0)
        return wait if wait > _SLACK_S else 0.0

    def charge(self, now: float, units: float) -> tuple[float, float]:
        """Charges `units` whether they fit or not.

        Returns their cost in seconds, 0 at a limit of 0, and the time at which they will have drained.
        """
        cost_s = units * self.window_s / self.limit if self.limit > 0 else 0.0
        self.tat = (self.tat if self.tat > now else now) + cost_s
        return cost_s, self.tat

    def refund(self, now: float, cost_s: float, drained_at: float) -> None:
        """Gives back all or part of the cost of an earlier charge that returned `drained_at`.

        The drained part is not given back. Otherwise, refunding an old charge would open a second burst on top of the
        capacity that time has already restored.
        """
        if drained_at > now:
            self.tat -= min(cost_s, drained_at - now)

    def used(self, now: float) -> float:
        """Returns the units in use; above the limit while in debt."""
        return max(0.0, self.tat - now) * max(0, self.limit) / self.window_s

    def reset_s(self, now: float) -> float:
        """Returns the seconds until nothing is in use."""
        return max(0.0, self.tat - now)

    def state(self, now: float) -> tuple[int, int, float]:
        """Returns the whole units that would be granted now, 0 to the limit; the limit; and `reset_s`."""
        limit, window_s, used_s = self.limit, self.window_s, self.tat - now
        if used_s < 0.0:
            used_s = 0.0
        room_s = window_s + _SLACK_S - used_s
        if room_s <= 0.0 or limit <= 0:
            return 0, limit, used_s
        remaining = int(room_s * limit / window_s)
        return remaining if remaining < limit else limit, limit, used_s


class Rates:
    """Buckets by name, at most `most`: the one that was charged least recently is evicted first.

    Methods take pairs of a name and its limit. `clock` returns seconds and never runs backwards.
    """

    def __init__(self, clock: Callable[[], float], most: int, window_s: float = WINDOW_S) -> None:
        self._clock = clock
        self._most = most
        self._window_s = window_s
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, *limits: tuple[str, int]) -> float:
        """Returns the seconds until one unit fits under every name, 0 if it fits now. Changes nothing."""
        now = self._clock()
        return max(self._buckets.get(name, _EMPTY).wait_s(now, 1) for name, _ in limits)

    def charge(self, *limits: tuple[str, int]) -> None:
        """Charges one unit under each name, whether it fits or not."""
        now = self._clock()
        for name, limit in limits:
            self._buckets.setdefault(name, Bucket(limit, self._window_s)).charge(now, 1)
            self._buckets.move_to_end(name)
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)

    def count(self, *limits: tuple[str, int]) -> float:
        """Charges one unit under each name and returns 0, or charges nothing and returns the seconds to wait."""
        wait_s = self.wait_s(*limits)
        if not wait_s:
            self.charge(*limits)
        return wait_s

    def waits(self, matches: Callable[[str], bool]) -> float:
        """Returns the longest wait under the names that match."""
        now = self._clock()
        return max((bucket.wait_s(now, 1) for name, bucket in self._buckets.items() if matches(name)), default=0.0)

    def forget(self, matches: Callable[[str], bool]) -> None:
        """Removes the names that match, so that one unit fits under each."""
        for name in [name for name in self._buckets if matches(name)]:
            del self._buckets[name]


_EMPTY: Final = Bucket(1)
