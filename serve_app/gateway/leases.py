"""This gateway's side of the limiter: asks in one ordered stream, and the holds that it keeps alive.

Asks of one gateway reach the limiter in the order in which they were made, so a client's next request never meets its
own last one as still open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from serve_app.gateway.coalesce import Coalescer, Unavailable
from serve_app.gateway.ports import LimiterPort
from serve_app.gateway.tasks import detached
from serve_app.limits.messages import Admit, Announce, Grant, OpenHold, Recovering, Release, Renew, ShardsDiffer

logger = logging.getLogger("ray.serve")

RENEW_S = 0.5
RETRY_S = 0.1
COMPANY_S = 0.002  # a release waits so long for the next ask, which would else find its call in flight and wait longer


class Leases:
    """Asks the limiter, and renews the holds of open requests until they are released."""

    def __init__(
        self,
        limiter: LimiterPort,
        holder: str,
        *,
        admit_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holder = holder
        self.admit_timeout_s = admit_timeout_s
        self._clock = clock
        self._open: dict[str, OpenHold] = {}
        self._shards = 1
        self._all_open: Callable[[], int] = lambda: len(self._open)
        self._is_agreed = False
        self.disagreement: str | None = None
        self._asks: Coalescer[Any, Any] = Coalescer(limiter.ask, timeout_s=5.0)
        self._beat: asyncio.Task[None] | None = None

    def join(self, shards: int, open_requests: Callable[[], int]) -> None:
        """Says how many limiter shards there are, and how to learn how many requests are open in all of them."""
        self._shards, self._all_open = shards, open_requests

    def start(self) -> None:
        """Starts the heartbeat."""
        self._beat = detached(self._renew_forever(), endless=True)

    async def stop(self) -> None:
        """Ends the heartbeat; holds that are still open then expire with their lease."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.wait([self._beat])

    @property
    def open_requests(self) -> int:
        """Requests that hold something."""
        return len(self._open)

    @property
    def is_agreed(self) -> bool:
        """Whether the limiter counts as many shards as this gateway, by its last answer."""
        return self._is_agreed

    async def agree(self) -> None:
        """Returns when the limiter has said that it counts as this gateway does.

        Raises Unavailable when it counts otherwise (`disagreement` says how), and when it is away for longer than
        `admit_timeout_s`.
        """
        deadline = self._clock() + self.admit_timeout_s
        while not self._is_agreed:
            try:
                await self._renew()
            except Unavailable:
                if self._clock() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                if self.disagreement is not None:
                    raise Unavailable(self.disagreement)

    async def ask(self, ask: Any) -> Any:
        """The limiter's answer; waits for a limiter that is restarting, at most `admit_timeout_s`.

        Raises Unavailable past that. Every ask is idempotent, so one whose answer was lost is simply asked again.
        """
        deadline = self._clock() + self.admit_timeout_s
        while True:
            wait = RETRY_S
            try:
                answer = await self._asks.submit(ask)
                if not isinstance(answer, Recovering):
                    return answer
                wait = max(0.01, answer.retry_in_s)
            except Unavailable:
                if self._clock() + wait >= deadline:
                    raise
            if self._clock() + wait >= deadline:
                raise Unavailable("the limiter is restarting")
            await asyncio.sleep(wait)

    def opened(self, admit: Admit, grant: Grant) -> None:
        """Keeps the grant's hold alive from here on."""
        self._open[grant.request_id] = OpenHold(
            request_id=grant.request_id,
            account_id=grant.account_id,
            key_id=grant.key_id,
            hold=grant.hold,
            tokens_charged=grant.tokens_charged,
            prompt_price=admit.prompt_price,
            output_price=admit.output_price,
            max_tokens=grant.max_tokens,
            backend=admit.backend,
            idempotency_key=admit.idempotency_key,
        )

    def adopt(self, holds: Sequence[OpenHold]) -> None:
        """Keeps holds of a gateway that died alive from here on; they are announced before anything else is asked."""
        if holds:
            self._open |= {hold.request_id: hold for hold in holds}
            self._asks.submit(Announce(self.holder, tuple(holds)))  # if it gets lost, the next heartbeat repeats it

    def release(self, release: Release) -> None:
        """Ends the hold. Never fails and never waits: it is called where a request is being cancelled."""
        self._open.pop(release.request_id, None)
        detached(self._release(release, self._asks.submit(release, company_s=COMPANY_S)))

    async def _release(self, release: Release, first: asyncio.Future[Any]) -> None:
        try:
            answer = await first
            if not isinstance(answer, Recovering):
                return
        except Unavailable:
            pass
        try:
            await self.ask(release)
        except Unavailable as error:
            # The limiter has lost the hold, or drops it with its lease: it is not renewed any more.
            logger.warning("release of %s did not reach the limiter: %s", release.request_id, error)

    async def _renew(self) -> None:
        answer = await self._asks.submit(Renew(self.holder, tuple(self._open), self._shards, self._all_open()))
        if isinstance(answer, ShardsDiffer):
            self._disagree(answer)
            return
        self._is_agreed, self.disagreement = True, None
        lost = tuple(self._open[request_id] for request_id in answer if request_id in self._open)
        if lost:
            await self._asks.submit(Announce(self.holder, lost))

    def _disagree(self, answer: ShardsDiffer) -> None:
        if answer.shards != self._shards:
            said = f"a limiter counts {answer.shards} limiter_shards and this gateway {self._shards}"
        else:
            said = f"a gateway that counts {answer.other} limiter_shards, not {self._shards}, has requests open"
        if said != self.disagreement:
            logger.error("nothing is let in: %s; change the number with the service stopped", said)
        self._is_agreed, self.disagreement = False, said

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._renew()
            except Unavailable as error:
                logger.warning("holds could not be renewed: %s", error)
            except Exception:
                logger.exception("renewing holds failed")
