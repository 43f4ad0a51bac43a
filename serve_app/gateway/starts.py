"""Spreads the starts of requests over the turns of the event loop, so that one account's burst delays no other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

PER_TURN: Final = 4  # maximum number of requests that start in one turn of the event loop


class Starts:
    """Lets at most PER_TURN requests start in one turn of the event loop. Accounts with waiting requests alternate.

    Without this limit, a burst would fill the loop: until all its requests had started, no other request would make
    progress, and the gateway would notice late that clients had hung up. A request whose client hangs up while it waits
    here costs next to nothing, because it was neither admitted nor sent to a replica.
    """

    def __init__(self) -> None:
        self._started = 0  # requests started in this turn
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by account; the next account comes first

    async def wait(self, account: str) -> None:
        """Returns when a request of this account may start: at once if none is waiting and this turn has room."""
        loop = asyncio.get_running_loop()
        if self._started < PER_TURN and not self._waiting:
            if not self._started:
                loop.call_soon(self._begin_turn)
            self._started += 1
            return
        place = loop.create_future()
        self._waiting.setdefault(account, deque()).append(place)
        await place

    def _begin_turn(self) -> None:
        self._started = 0
        while self._waiting and self._started < PER_TURN:
            account = next(iter(self._waiting))
            places = self._waiting.pop(account)
            place = places.popleft()
            if places:
                self._waiting[account] = places
            if not place.done():  # otherwise its client has hung up
                place.set_result(None)
                self._started += 1
        if self._started:
            asyncio.get_running_loop().call_soon(self._begin_turn)
