"""Writes the audit records that do not result from a change of the ledger: failed log-ins and new prices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable, detached
from serve_app.contracts.commands import Command, RecordAudit, RecordPrices
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.money import Price
from serve_app.contracts.ports import BooksPort

logger = logging.getLogger("ray.serve")

WINDOW_S: Final = 60.0
MAX_ADDRESSES: Final = 100  # addresses counted separately in one window; all other addresses share one record
OTHERS: Final = "other addresses"
RETRY_S: Final = 5.0
TRIES: Final = 120


class FailedLogins:
    """Counts wrong operator and management keys: one audit record per address and window.

    A record is written when its window ends, with the number of attempts, so guessed keys can't fill the ledger. The
    first attempt is also logged.
    """

    def __init__(self, books: BooksPort, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._books = books
        self._sleep = sleep
        self._tries: dict[str, int] = {}

    def count(self, address: str) -> None:
        """Counts an attempt. Never waits."""
        if address not in self._tries and len(self._tries) >= MAX_ADDRESSES:
            address = OTHERS
        if address not in self._tries:
            self._tries[address] = 0
            logger.warning("a wrong operator or management key from %s", address)
            detached(self._record(address), endless=True)
        self._tries[address] += 1

    async def _record(self, address: str) -> None:
        await self._sleep(WINDOW_S)
        tries = self._tries.pop(address)
        audit = Audit("unknown", address=address)
        await run_at_last(self._books, RecordAudit(audit, "failed_login", "service", detail={"tries": tries}))


def record_prices(books: BooksPort, prices: Mapping[str, Price]) -> None:
    """Records new prices in the background. `prices` has the current price of each model. Never waits."""
    audit = Audit("deployment")
    detached(run_at_last(books, RecordPrices({model: prices[model] for model in sorted(prices)}, audit)), endless=True)


async def run_at_last(books: BooksPort, command: Command[None]) -> None:
    """Runs a command that no client waits for, and retries it while the ledger is unavailable."""
    for _ in range(TRIES):
        try:
            await books.run(command)
            return
        except (Unavailable, LedgerError) as error:
            failure = error
        await asyncio.sleep(RETRY_S)
    logger.error("an audit record could not be written (%s): %r", failure, command)
