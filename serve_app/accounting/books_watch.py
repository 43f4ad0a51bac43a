"""Checks the books at intervals, in steps, and exports the result, so that an alert can fire."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.contracts import metrics
from serve_app.contracts.books import CheckReport
from serve_app.contracts.calls import repeat
from serve_app.contracts.commands import CheckBooks
from serve_app.contracts.metric import Metrics

logger = logging.getLogger("ray.serve")

STEP_S = 0.5  # time per step; operators' reads and other checks run between the steps


class BooksWatch:
    """Runs a check from the last checkpoint every `every_s` seconds, the first immediately. `run` executes commands.

    A difference stays in its checkpoint until an operator's full check, so the count does not fall by itself.
    """

    def __init__(
        self,
        run: Callable[[CheckBooks], Awaitable[Any]],
        exported: Metrics,
        every_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._exported = exported
        self._every_s = every_s
        self._wall = wall

    async def check_forever(self) -> None:
        """Runs until cancelled."""
        await repeat(self.check, self._every_s, f"the books could not be checked, next try in {self._every_s:g} s")

    async def check(self) -> int:
        """Runs one complete check and returns the number of differences. Raises LedgerError."""
        found, after = 0, None
        while True:
            report = await self._run(CheckBooks(after=after, seconds=STEP_S))
            if not isinstance(report, CheckReport):
                raise report
            for difference in report.differences:
                logger.critical("the books do not balance: %s", difference)
            found += len(report.differences)
            if report.next is None:
                break
            after = report.next
        self._exported.set(metrics.BOOKS_DIFFERENCES, found)
        self._exported.set(metrics.BOOKS_CHECKED, self._wall())
        return found
