"""Checks the number of limiter shards: a gateway with a different number would ask the wrong limiter for an account.

Each heartbeat carries the number of shards that its gateway is configured with. A gateway whose number differs from the
limiter's must admit nothing. Such a gateway may have open requests, whose holds other limiters know. Until these
requests have ended, no gateway may admit anything. So no balance is spent twice, even if the number is changed without
stopping the service.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.contracts.limiting import Renew, ShardsDiffer


class ShardCount:
    """One limiter's check. `clock` returns seconds. Requests of a dead gateway block admissions for `lease_s`."""

    def __init__(self, shards: int, clock: Callable[[], float], lease_s: float) -> None:
        self._shards = shards
        self._clock = clock
        self._lease_s = lease_s
        self._blocked_until = 0.0
        self._other = shards

    def objection(self, beat: Renew) -> ShardsDiffer | None:
        """Returns the reason why the gateway must admit nothing; None when it may."""
        now = self._clock()
        if beat.shards != self._shards:
            if beat.open_requests:
                self._blocked_until, self._other = now + self._lease_s, beat.shards
            return ShardsDiffer(self._shards, beat.shards)
        return ShardsDiffer(self._shards, self._other) if now < self._blocked_until else None
