"""One rate limit as one timestamp: the generic cell rate algorithm with weights, refunds and debt."""

from __future__ import annotations

from math import inf
from typing import Final

WINDOW_S: Final = 60.0
_SLACK_S: Final = 1e-6  # forgives float rounding; worth a millionth of a second of the rate, once, not per request


class Bucket:
    """A limit of `limit` units a minute with a burst of one minute's worth.

    The state is the theoretical arrival time: the moment at which everything charged so far will have drained. The
    time until then is the share of the minute in use. Costs are given as seconds too (`cost_s` converts), so that a
    limit that changes between a charge and its correction keeps the share in use: half full stays half full.

    Source: ITU-T I.371 annex A, virtual scheduling, with an increment in proportion to each cell's cost. Times are
    seconds of any one clock that never runs backwards. Exact to the unit up to ten million units a minute.
    """

    __slots__ = ("limit", "tat")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tat = -inf

    def cost_s(self, units: float) -> float:
        """The seconds that `units` take to drain; infinity at a limit of 0, which grants nothing."""
        return units * WINDOW_S / self.limit if self.limit > 0 else inf

    def wait_s(self, now: float, cost_s: float) -> float:
        """Seconds until a cost would be granted, 0 when it would be now. Changes nothing.

        A cost above the whole limit can never fit. It is granted when nothing else is in use and puts the bucket into
        debt, so that one large request is delayed and paid for in full, but not refused for ever.
        """
        if cost_s == inf:
            return inf
        wait = self.tat - now - max(0.0, WINDOW_S - cost_s)
        return wait if wait > _SLACK_S else 0.0

    def charge(self, now: float, cost_s: float) -> float:
        """Takes a cost whether it fits or not (into debt if not); answers the time at which it will have drained."""
        if cost_s < inf:
            self.tat = max(self.tat, now) + cost_s
        return self.tat

    def take(self, now: float, units: float) -> tuple[float, float]:
        """Charges `units`, whether they fit or not; answers their cost, 0 at a limit of 0, and as `charge` does."""
        cost_s = units * WINDOW_S / self.limit if self.limit > 0 else 0.0
        self.tat = (self.tat if self.tat > now else now) + cost_s
        return cost_s, self.tat

    def refund(self, now: float, cost_s: float, drained_at: float) -> None:
        """Gives back a cost out of an earlier charge, of which `drained_at` is what `charge` answered.

        What has drained by itself is gone and is not given back: else a charge made long ago and refunded now would
        open a second burst on top of the one that time has already restored.
        """
        if drained_at > now:
            self.tat -= min(cost_s, drained_at - now)

    def used(self, now: float) -> float:
        """Units in use; above the limit while in debt."""
        return max(0.0, self.tat - now) * max(0, self.limit) / WINDOW_S

    def remaining(self, now: float) -> int:
        """Whole units that would be granted now, 0 to the limit."""
        return self.state(now)[1]

    def reset_s(self, now: float) -> float:
        """Seconds until nothing is in use."""
        return max(0.0, self.tat - now)

    def state(self, now: float) -> tuple[int, int, float]:
        """Limit, `remaining` and `reset_s` in one."""
        limit, used_s = self.limit, self.tat - now
        if used_s < 0.0:
            used_s = 0.0
        room_s = WINDOW_S + _SLACK_S - used_s
        if room_s <= 0.0 or limit <= 0:
            return limit, 0, used_s
        remaining = int(room_s * limit / WINDOW_S)
        return limit, remaining if remaining < limit else limit, used_s
