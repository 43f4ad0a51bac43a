"""One rate limit as one timestamp: the generic cell rate algorithm with weights, refunds and debt."""

from __future__ import annotations

from math import inf
from typing import Final

WINDOW_S: Final = 60.0
_SLACK_S: Final = 1e-6  # allows for float rounding: a millionth of a second of the rate, once, not for each request


class Bucket:
    """A limit of `limit` units in each window, a minute by default, with a burst of one window's worth.

    The state is the theoretical arrival time: the moment at which everything charged so far has drained. The time
    until then is the part of the window in use. `charge` returns a cost in seconds too, so that a limit that changes
    between a charge and its correction keeps the part in use: half full stays half full.

    Source: ITU-T I.371 annex A, virtual scheduling, with an increment in proportion to each cell's cost. Times are
    seconds of any one clock that never runs backwards. Exact to the unit up to ten million units a minute.
    """

    __slots__ = ("limit", "tat", "window_s")

    def __init__(self, limit: int, window_s: float = WINDOW_S) -> None:
        self.limit = limit
        self.window_s = window_s
        self.tat = -inf

    def cost_s(self, units: float) -> float:
        """The seconds that `units` take to drain; infinity at a limit of 0, which grants nothing."""
        return units * self.window_s / self.limit if self.limit > 0 else inf

    def wait_s(self, now: float, units: float) -> float:
        """Seconds until `units` fit, 0 when they fit now. Changes nothing.

        More units than the whole limit never fit. They are granted when nothing else is in use and put the bucket
        into debt, so that one large request is delayed and counted in full, but not refused for ever.
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
        """Gives back a cost, or a part of it, of an earlier charge that returned `drained_at`.

        What has drained by itself is not given back. Otherwise a refund of an old charge would open a second burst on
        top of what time has already restored.
        """
        if drained_at > now:
            self.tat -= min(cost_s, drained_at - now)

    def used(self, now: float) -> float:
        """Units in use; above the limit while in debt."""
        return max(0.0, self.tat - now) * max(0, self.limit) / self.window_s

    def reset_s(self, now: float) -> float:
        """Seconds until nothing is in use."""
        return max(0.0, self.tat - now)

    def state(self, now: float) -> tuple[int, int, float]:
        """The whole units that would be granted now, 0 to the limit; the limit; `reset_s`."""
        limit, window_s, used_s = self.limit, self.window_s, self.tat - now
        if used_s < 0.0:
            used_s = 0.0
        room_s = window_s + _SLACK_S - used_s
        if room_s <= 0.0 or limit <= 0:
            return 0, limit, used_s
        remaining = int(room_s * limit / window_s)
        return remaining if remaining < limit else limit, limit, used_s
