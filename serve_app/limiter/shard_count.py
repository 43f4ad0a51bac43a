"""Guards the number of limiter shards: a gateway with another number would ask another limiter about an account.

Each heartbeat carries the number of shards that its gateway is configured with. A gateway with another number than
the limiter's must admit nothing. While such a gateway has requests open, whose holds lie with the limiters of the
other number, no gateway may admit anything. So a change of the number lets no balance be spent twice, also when it is
made without stopping the service.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.contracts.limiting import Renew, ShardsDiffer


class ShardCount:
    """One limiter's side of it. `clock` returns seconds. Requests of a gateway that has died block for `lease_s`."""

    def __init__(self, shards: int, clock: Callable[[], float], lease_s: float) -> None:
        self._shards = shards
        self._clock = clock
        self._lease_s = lease_s
        self._blocked_until = 0.0
        self._other = shards

    def objection(self, beat: Renew) -> ShardsDiffer | None:
        """Why the gateway must admit nothing; None when it may."""
        now = self._clock()
        if beat.shards != self._shards:
            if beat.open_requests:
                self._blocked_until, self._other = now + self._lease_s, beat.shards
            return ShardsDiffer(self._shards, beat.shards)
        return ShardsDiffer(self._shards, self._other) if now < self._blocked_until else None
