"""Queues between the callbacks of an event loop and its coroutines, for large numbers of items."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

KEYS_PER_TURN: Final = 32  # keys per turn of the event loop: about a millisecond of work


class Inbox(Generic[Item]):
    """Items in the order of their arrival. Belongs to one event loop, and only one coroutine reads it.

    asyncio.Queue and asyncio.timeout look up the running loop at every step, which is a system call (Python 3.11). For
    streamed items, this would cost more than all other work on them.
    """

    __slots__ = ("_arrived", "_loop", "items")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[Item] = deque()
        self._loop = loop
        self._arrived: asyncio.Future[None] | None = None  # the reader waits for it; None: the reader is not waiting

    def put(self, item: Item) -> None:
        self.items.append(item)
        if self._arrived is not None:
            _set(self._arrived)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns when there is an item, or after `timeout_s` seconds."""
        if self.items or timeout_s == 0:
            return
        arrived = self._arrived = self._loop.create_future()
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, _set, arrived)
        try:
            await arrived
        finally:
            self._arrived = None
            if timer is not None:
                timer.cancel()

    async def get(self) -> Item:
        """Returns the next item."""
        if not self.items:
            await self.wait()
        return self.items.popleft()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Turns(Generic[Key, Item]):
    """Hands out items by key. Each turn of the event loop handles a few keys, so that other work runs in between.

    All waiting items of a key are handed out together. A loop that falls behind therefore hands out fewer, larger
    pieces.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hand_out: Callable[[Key, list[Item]], None]) -> None:
        self._loop = loop
        self._hand_out = hand_out
        self._waiting: dict[Key, list[Item]] = {}
        self._is_scheduled = False

    def add(self, items: Iterable[tuple[Key, Item]]) -> None:
        """Adds items. Hands out the first ones at once, unless earlier items are waiting."""
        waiting = self._waiting
        for key, item in items:
            if (ones := waiting.get(key)) is None:
                waiting[key] = [item]
            else:
                ones.append(item)
        if not self._is_scheduled:
            self._take_turn()

    def finish(self) -> None:
        """Hands out all items that wait."""
        waiting = self._waiting
        for key in list(waiting):
            self._hand_out(key, waiting.pop(key))

    def _take_turn(self) -> None:
        waiting = self._waiting
        for key in list(itertools.islice(waiting, KEYS_PER_TURN)):
            self._hand_out(key, waiting.pop(key))
        self._is_scheduled = bool(waiting)
        if waiting:
            self._loop.call_soon(self._take_turn)
