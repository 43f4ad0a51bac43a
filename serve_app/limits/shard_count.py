"""How many limiter shards there are: gateways that count otherwise would ask others about the same accounts.

Each heartbeat tells how many shards its gateway counts. A gateway that counts otherwise is told so and lets nothing in;
while one of those has requests open, whose holds lie with limiters that count as it does, nobody is let in. So a change
of the number lets no balance be spent twice, also when somebody makes it without stopping the service.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.limits.messages import Renew, ShardsDiffer


class ShardCount:
    """One limiter's side of it. `clock` answers seconds; a gateway that has died is waited for for `lease_s`."""

    __slots__ = ("_clock", "_closed_until", "_lease_s", "_other", "shards")

    def __init__(self, shards: int, clock: Callable[[], float], lease_s: float) -> None:
        self.shards = shards
        self._clock = clock
        self._lease_s = lease_s
        self._closed_until = 0.0
        self._other = shards

    def hear(self, beat: Renew) -> ShardsDiffer | None:
        """What speaks against the gateway letting requests in; None when nothing does."""
        now = self._clock()
        if beat.shards != self.shards:
            if beat.open_requests:
                self._closed_until, self._other = now + self._lease_s, beat.shards
            return ShardsDiffer(self.shards, beat.shards)
        return ShardsDiffer(self.shards, self._other) if now < self._closed_until else None
