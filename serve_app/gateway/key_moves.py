"""Moves keys that were found under the key secret before to the current one, behind the requests that use them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from serve_app.contracts.calls import Coalescer
from serve_app.contracts.key_format import Hashed
from serve_app.contracts.key_secrets import MAX_MOVES, KeyMove, MoveKeys
from serve_app.contracts.ports import BooksPort

logger = logging.getLogger("ray.serve")

TIMEOUT_S: Final = 10.0  # of one call to the ledger
AGAIN_S: Final = (
    5.0  # after a move: limiters know the new digest long before; after a failure, the next use tries again
)
MAX_KEYS: Final = 10_000


class KeyMoves:
    """One call to the ledger at a time, for all keys that are used meanwhile: settlements share its turns.

    `clock` gives seconds and never runs backwards.
    """

    def __init__(self, books: BooksPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._books = books
        self._clock = clock
        self._calls: Coalescer[KeyMove, bool] = Coalescer(self._send, timeout_s=TIMEOUT_S, most=MAX_MOVES)
        self._not_before: dict[str, float] = {}  # digest -> when its key may be moved again; inf: it is being moved

    def move(self, before: Hashed, after: Hashed, moved: Callable[[], None] = lambda: None) -> None:
        """Returns at once. `moved` is called when the key is found by both digests."""
        if self._not_before.get(before.digest, 0.0) > self._clock():
            return
        self._wait(before.digest, inf)
        call = self._calls.submit(KeyMove(before, after))
        call.add_done_callback(partial(self._ended, before.digest, moved))

    async def _send(self, moves: list[KeyMove]) -> list[bool]:
        try:
            return await self._books.run(MoveKeys(tuple(moves)))
        except Exception as error:
            logger.warning("%d keys wait for their move: %s: %s", len(moves), type(error).__name__, error)
            raise

    def _ended(self, digest: str, moved: Callable[[], None], call: asyncio.Future[bool]) -> None:
        self._wait(digest, self._clock() + AGAIN_S)
        if not call.cancelled() and call.exception() is None and call.result():
            moved()

    def _wait(self, digest: str, until: float) -> None:
        self._not_before.pop(digest, None)
        self._not_before[digest] = until
        if len(self._not_before) > MAX_KEYS:
            del self._not_before[next(iter(self._not_before))]
