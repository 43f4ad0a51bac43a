"""Ensures that one limiter at a time admits for a shard: the holder of the shard's lease in the ledger.

Why two limiters never admit at the same moment: the holder counts its lease from just before it sent its
last successful renewal. It checks its clock at each admission, and this clock continues while the process is stopped. A
successor waits for one of three things: the lease was released, the holder's process has ended, or the lease was seen
unchanged for its whole length. The successor sees each renewal only after the holder sent it, so in the third case
its wait ends only after the holder's lease has ended. `accounting/limiter_leases.py` implements the successor's side.

Why a successor knows every open hold: a gateway uses no grant that arrives more than GRANT_TRUST_S after it sent the
request. So GRANT_TRUST_S after a predecessor stopped, its gateways know every grant that they will ever use. A gateway
learns from its heartbeats that its limiter does not admit. It announces its holds to a new limiter of the same service,
and posts them in the ledger for a limiter of another service. The successor waits RECOVERY_S, which is longer than
GRANT_TRUST_S, reads the posted holds and the ledger's changes, and only then admits. A settlement removes the posted
hold of its request. The lease holder sees this with the next renewal, and frees the hold after it has read the balance
that the settlement left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final

from serve_app.contracts.calls import boottime, shard_of
from serve_app.contracts.commands import HoldLease, LeaseState, ReleaseLease
from serve_app.contracts.limiting import OpenHold, owner_of
from serve_app.contracts.ports import BooksPort
from serve_app.limiter.processes import has_ended, process_name

if TYPE_CHECKING:
    from serve_app.limiter.limiter_service import LimiterService

logger = logging.getLogger("ray.serve")

POLL_S: Final = 0.5  # between two attempts to get the lease
YIELD_S: Final = 3.0  # pause after this limiter released the lease in favour of another one, which takes it meanwhile
CALL_S: Final = 5.0  # timeout per call to the ledger
RENEWALS: Final = 8  # renewals within the length of a lease
CLOCK_DRIFT: Final = 0.01  # maximum difference in the rate of two clocks, as a fraction
YIELD_TO: Final = 2  # the lease goes to another limiter whose demand is above this multiple of the holder's demand


class Tenure:
    """Gets, renews and releases the lease, and sets until when `service.admission` admits.

    `lasts_s` is the length of the lease: without a further renewal, this limiter stops admitting after that time.
    """

    def __init__(
        self,
        service: LimiterService,
        accounting: BooksPort,
        *,
        shard: int,
        shards: int,
        lasts_s: float,
        clock: Callable[[], float] = boottime,
        process: str | None = None,
        ended: Callable[[str], bool] = has_ended,
    ) -> None:
        self.epoch: int | None = None
        self._service = service
        self._accounting = accounting
        self.shard, self._shards = shard, shards
        self._lasts_s = lasts_s
        self._clock = clock
        self._process = process_name() if process is None else process
        self._ended = ended
        self._is_ready = False
        self._turning = asyncio.Lock()
        self._has_ended = False
        service.admission.admits_until = -inf

    async def turn(self) -> float:
        """Gets or renews the lease, unless another limiter has it. Returns the seconds until the next turn."""
        async with self._turning:
            return POLL_S if self._has_ended else await self._turn()

    async def end(self) -> None:
        """Releases the lease permanently: no later turn takes it again. Raises as `_release` does."""
        async with self._turning:
            self._has_ended = True
            await self._release()

    async def _turn(self) -> float:
        sent, state = await self._hold(())
        if state.epoch is None and (ended := [one.epoch for one in state.blockers if self._ended(one.holder)]):
            self._lose()
            sent, state = await self._hold(tuple(ended))
        if state.epoch is None:
            self._lose()
            return POLL_S
        admission = self._service.admission
        if state.epoch != self.epoch:
            self._lose()
            self.epoch = admission.epoch = state.epoch
            admission.recover()
            logger.info("limiter shard %d of %d: epoch %d begins", self.shard, self._shards, state.epoch)
        elif state.wanted > YIELD_TO * self._service.demand():
            logger.info("epoch %d ends: %d requests wait at another limiter", state.epoch, state.wanted)
            await self._release()
            return YIELD_S
        await self._learn(state.holds)
        self._is_ready = self._is_ready or sent >= admission.recovering_until
        if not self._is_ready:
            return max(0.0, admission.recovering_until - self._clock())
        admission.admits_until = sent + self._lasts_s * (1 - CLOCK_DRIFT)
        return self._lasts_s / RENEWALS

    async def _release(self) -> None:
        """Stops admitting and lets a successor begin at once. Raises when the ledger does not answer."""
        epoch = self.epoch
        self._lose()
        if epoch is None:
            return
        holds: dict[str, list[OpenHold]] = {}
        for holder, hold in self._service.admission.open_holds():
            holds.setdefault(owner_of(holder, self.shard), []).append(hold)
        async with asyncio.timeout(CALL_S):
            await self._accounting.run(ReleaseLease(epoch, {owner: tuple(one) for owner, one in holds.items()}))

    async def _hold(self, ended: tuple[int, ...]) -> tuple[float, LeaseState]:
        sent = self._clock()
        waiting = self._service.demand()
        async with asyncio.timeout(CALL_S):
            state = await self._accounting.run(
                HoldLease(self.shard, self._shards, self._process, self._lasts_s, waiting, ended)
            )
        return sent, state

    def _lose(self) -> None:
        if self.epoch is not None:
            logger.warning("limiter shard %d of %d: epoch %d has ended", self.shard, self._shards, self.epoch)
        self.epoch, self._is_ready = None, False
        self._service.admission.admits_until = -inf

    async def _learn(self, posted: tuple[OpenHold, ...]) -> None:
        """Adds posted holds, and frees those that are no longer posted."""
        admission = self._service.admission
        gone = admission.take_posted([one for one in posted if shard_of(one.account_id, self._shards) == self.shard])
        if gone or not self._is_ready:
            # The requests of holds that are gone were settled before this read, so the read includes their balances.
            while await self._service.follow():
                pass
            admission.drop_posted(gone)
