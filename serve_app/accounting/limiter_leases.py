"""Decides which limiter admits for a shard, and stores the open holds that its successor must know.

A lease is a row with an epoch and a count of renewals. Times of different clocks are never compared, only durations as
each side measures them:
- The holder may admit for `lasts_s`, counted from just before it sent the renewal that succeeded.
- A successor takes over if the lease was released, or if the holder's process is known to have ended. It also takes
  over if `LeaseWatch` has seen the same epoch and count of renewals for `lasts_s`. `LeaseWatch` sees a renewal only
  after its commit, so it starts to count later than the holder. The takeover compares epoch and count once more and
  raises the epoch, in one transaction. After that, no renewal of the old epoch succeeds.

The holder has therefore stopped before a successor begins. A lease for a different number of shards covers accounts of
every shard, so it also blocks a takeover until it has ended. The takeover then removes it.

`limiter_holds` has the open holds that the holder of the lease might not learn from its own gateways. A limiter stores
its open holds there when it releases its lease. A gateway whose limiter has no lease, or does not answer, stores its
own holds there (`PostHolds`). A settlement removes the request's row in its own transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

from sqlalchemy import Connection, delete, insert, select, update

from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import writes
from serve_app.accounting.schema import limiter_holds, limiter_leases, usage
from serve_app.contracts.calls import boottime
from serve_app.contracts.commands import Blocker, HoldLease, LeaseState, PostHolds, ReleaseLease
from serve_app.contracts.limiting import OpenHold

KEPT_S: Final = 3600.0  # retention of a hold whose gateway has ended and whose request is never settled
LOOK_S: Final = 2.0  # maximum time counted between two observations of another holder's lease: see `LeaseWatch`

MAX_SEEN: Final = 200  # leases that a process remembers

_HOLD_FIELDS: Final = frozenset(field.name for field in fields(OpenHold))

_leases = limiter_leases.c


@writes(HoldLease)
def hold_lease(transaction: Transaction, wanted: HoldLease, now: float) -> LeaseState:
    connection = transaction.connection
    connection.execute(delete(limiter_holds).where(limiter_holds.c.posted_at < now - KEPT_S))
    rows = connection.execute(select(limiter_leases)).all()
    mine = next((row for row in rows if (row.shards, row.shard) == (wanted.shards, wanted.shard)), None)
    this = (_leases.shards == wanted.shards) & (_leases.shard == wanted.shard)
    if mine is not None and mine.holder == wanted.holder and not mine.released:
        renewed = {"renewals": mine.renewals + 1, "lasts_s": wanted.lasts_s, "wanted": 0}
        connection.execute(update(limiter_leases).where(this).values(renewed))
        return LeaseState(mine.epoch, mine.renewals + 1, mine.wanted, _holds(connection))
    blocking = [
        row
        for row in rows
        if (row is mine or row.shards != wanted.shards)
        and not row.released
        and row.epoch not in wanted.ended
        and (row.epoch, row.renewals) not in wanted.over
    ]
    if blocking:
        if wanted.waiting:
            epochs = [row.epoch for row in blocking]
            connection.execute(
                update(limiter_leases).where(_leases.epoch.in_(epochs)).values({"wanted": wanted.waiting})
            )
        blockers = tuple(Blocker(row.epoch, row.renewals, row.holder, row.lasts_s) for row in blocking)
        return LeaseState(None, blockers=blockers)
    epoch = max((row.epoch for row in rows), default=0) + 1
    connection.execute(delete(limiter_leases).where(this | (_leases.shards != wanted.shards)))
    connection.execute(
        insert(limiter_leases).values(
            shards=wanted.shards, shard=wanted.shard, epoch=epoch, holder=wanted.holder, renewals=0,
            lasts_s=wanted.lasts_s, released=False, wanted=0,
        )
    )  # fmt: skip
    return LeaseState(epoch, holds=_holds(connection))


@writes(ReleaseLease)
def release_lease(transaction: Transaction, wanted: ReleaseLease, now: float) -> bool:
    for owner, holds in wanted.holds.items():
        _store_holds(transaction.connection, owner, holds, now)
    released = update(limiter_leases).where(_leases.epoch == wanted.epoch).values(released=True)
    return transaction.connection.execute(released).rowcount > 0


@writes(PostHolds)
def post_holds(transaction: Transaction, wanted: PostHolds, now: float) -> bool:
    transaction.connection.execute(delete(limiter_holds).where(limiter_holds.c.owner == wanted.owner))
    _store_holds(transaction.connection, wanted.owner, wanted.holds, now)
    return True


def _store_holds(connection: Connection, owner: str, holds: Sequence[OpenHold], now: float) -> None:
    ids = [hold.request_id for hold in holds]
    if not ids:
        return
    settled = set(connection.execute(select(usage.c.request_id).where(usage.c.request_id.in_(ids))).scalars())
    connection.execute(delete(limiter_holds).where(limiter_holds.c.request_id.in_(ids)))
    rows = [
        {"request_id": hold.request_id, "account_id": hold.account_id, "owner": owner, "posted_at": now}
        | {"terms": json.dumps(asdict(hold))}
        for hold in holds
        if hold.request_id not in settled
    ]
    if rows:
        connection.execute(insert(limiter_holds), rows)


def _holds(connection: Connection) -> tuple[OpenHold, ...]:
    return tuple(map(_hold_of, connection.execute(select(limiter_holds.c.terms)).scalars()))


def _hold_of(terms: str) -> OpenHold:
    """Decodes a stored hold. Ignores fields that a later release has added."""
    return OpenHold(**{name: value for name, value in json.loads(terms).items() if name in _HOLD_FIELDS})


@dataclass(slots=True)
class _Sighting:
    """A lease as this process last saw it."""

    renewals: int
    lasts_s: float
    written_here: bool
    since: float  # when this value of `renewals` was first seen, plus the time that does not count
    looked_at: float


class LeaseWatch:
    """Measures how long this process has seen each lease unchanged.

    If this process wrote the latest renewal, all time since then counts. For other leases, at most LOOK_S of the time
    between two observations counts, because the ledger may have been unavailable between them: the holder could not
    renew then, and its gateways could not post their holds.
    """

    def __init__(self, clock: Callable[[], float] = boottime) -> None:
        self._clock = clock
        self._seen: dict[int, _Sighting] = {}  # by epoch

    def with_over(self, wanted: HoldLease) -> HoldLease:
        """Returns the command, with `over` naming the leases that were seen unchanged for their full duration."""
        now = self._clock()
        over = []
        for epoch, one in self._seen.items():
            until = now if one.written_here else min(now, one.looked_at + LOOK_S)
            if until - one.since >= one.lasts_s:
                over.append((epoch, one.renewals))
        return replace(wanted, over=tuple(over))

    def look(self, wanted: HoldLease, state: LeaseState) -> None:
        """Records the leases in the answer to a command."""
        now = self._clock()
        for lease in state.blockers:
            self._see(lease, False, now)
        if state.epoch is not None:
            self._see(Blocker(state.epoch, state.renewals, wanted.holder, wanted.lasts_s), True, now)
        while len(self._seen) > MAX_SEEN:
            del self._seen[min(self._seen)]

    def _see(self, lease: Blocker, written_here: bool, now: float) -> None:
        known = self._seen.get(lease.epoch)
        if known is None or known.renewals != lease.renewals:
            self._seen[lease.epoch] = _Sighting(lease.renewals, lease.lasts_s, written_here, now, now)
            return
        if not known.written_here:
            known.since += max(0.0, now - known.looked_at - LOOK_S)
        known.looked_at = now
