"""Keeps track of the responses that this gateway runs in the background, without a connection.

The ledger has a row for each response from its start. While the response runs, its gateway renews a time in the row. If
the gateway has been silent for RESPONSE_LOST_S, readers treat the response as failed. The final response is written
together with the settlement of its request, so it is complete if and only if it is billed as complete.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from serve_app.contracts.calls import Unavailable, detached
from serve_app.contracts.commands import BeatResponses
from serve_app.contracts.errors import LedgerError
from serve_app.gateway.settlements import Settlements

logger = logging.getLogger("ray.serve")

BEAT_S = 2.0  # between two renewals of the rows of running responses


class BackgroundRuns:
    """The runs of one gateway. Each is identified by its account and its response id."""

    def __init__(self, settlements: Settlements) -> None:
        self._settlements = settlements
        self._tasks: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._beating: asyncio.Task[Any] | None = None
        self.is_stopping = False

    def start(self, account_id: str, response_id: str, task: asyncio.Task[Any]) -> None:
        """Renews the response's row until the task ends, and cancels the task when a client cancels the response."""
        key = account_id, response_id
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        if self._beating is None or self._beating.done():
            self._beating = detached(self._beat_while_running(), endless=True)

    async def stop(self, within_s: float) -> None:
        """Waits up to `within_s` seconds for the runs in progress. Then the rest fail, and are not billed."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=within_s)
        self.is_stopping = True
        for task in list(self._tasks.values()):
            _cancel_once(task)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=within_s)
        if self._beating is not None:
            self._beating.cancel()

    async def _beat_while_running(self) -> None:
        while self._tasks:
            await asyncio.sleep(BEAT_S)
            try:
                to_cancel = await self._settlements.ask(BeatResponses(tuple(self._tasks)))
            except (Unavailable, LedgerError) as error:
                logger.warning("could not renew the responses that run in the background: %s", error)
                continue
            for key in to_cancel:
                if (task := self._tasks.get(tuple(key))) is not None:  # type: ignore[arg-type]
                    _cancel_once(task)


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancels a run, but never twice: a second time could interrupt it while it records its end in the ledger."""
    if not task.cancelling():
        task.cancel()
