"""Operators' notices to customers, cached in this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Final

from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.operators import Announcement, ListAnnouncements
from serve_app.contracts.ports import BooksPort

KEPT_S: Final = 15.0
MAX_SHOWN: Final = 3


class Notices:
    """Reads the notices at most every KEPT_S. `now` returns Unix seconds."""

    def __init__(self, books: BooksPort, now: Callable[[], float]) -> None:
        self._books, self._now = books, now
        self._known: list[Announcement] = []
        self._until = -math.inf

    async def look(self) -> None:
        """Reads the notices again after KEPT_S. Keeps the known ones while the ledger is unavailable."""
        if self._now() >= self._until:
            self._until = self._now() + KEPT_S
            with contextlib.suppress(Unavailable, LedgerUnavailable):
                self._known = await self._books.run(ListAnnouncements())

    def forget(self) -> None:
        self._until = -math.inf

    def shown(self, account_id: str | None) -> list[Announcement]:
        """Returns the notices that people of an account see now. `account_id` is None on pages without an account."""
        now = self._now()
        mine = [one for one in self._known if one.account_id in ("", account_id)]
        return [one for one in mine if one.starts_at <= now and (one.ends_at is None or now < one.ends_at)][:MAX_SHOWN]
