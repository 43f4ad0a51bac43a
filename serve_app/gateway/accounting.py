"""The accounting process without Ray: settles usage, and keeps the books tidy. All its state is in the database.

Several of them may share one ledger: the database lets one write at a time, and everything here is repeatable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from serve_app.gateway.tasks import detached
from serve_app.ledger import Ledger, LedgerError, LedgerUnavailable, SettlementRefused
from serve_app.ledger.group_commit import GroupCommitter
from serve_app.ledger.messages import Refusal, Settled, Settlement, SettlementRejected

logger = logging.getLogger("ray.serve")

OPERATIONS = frozenset(
    {
        "create_account", "list_accounts", "get_account", "set_limits", "set_active", "credit", "correct", "take_back",
        "grants", "expire_grants", "create_key", "update_key", "list_keys", "revoke_key", "find_key", "changes",
        "usage", "export_usage", "find_reply", "prune_replies", "audit_log", "check",
    }
)  # fmt: skip


TIDY_EVERY_S = 60.0  # how late an expired grant or an old reply may leave


class AccountingService:
    """Settles usage and runs account operations on one ledger."""

    def __init__(self, ledger: Ledger, *, give_up_after_s: float = 5.0, tidy_every_s: float = TIDY_EVERY_S) -> None:
        self._ledger = ledger
        self._tidy_every_s = tidy_every_s
        self._closing = asyncio.Event()
        self._tidying: asyncio.Task[None] | None = None
        self._committer = GroupCommitter(ledger.settle, give_up_after_s=give_up_after_s)

    def start(self) -> None:
        """Takes expired grants off the books and forgets old replies, every now and then from here on."""
        self._tidying = detached(self._tidy_forever())

    async def settle(self, settlements: list[Settlement]) -> list[Settled | SettlementRejected | LedgerUnavailable]:
        """Durable when it returns. What waits together is committed together.

        LedgerUnavailable in the place of an answer: unknown whether settled, ask again with the same id.
        """
        futures = self._committer.submit_all(settlements)
        # They are done in their order, so nearly always this waits once, for the last: not a task for each.
        for future in reversed(futures):
            if not future.done():
                with contextlib.suppress(Exception):
                    await asyncio.wrap_future(future)
        return [self._answer(*pair) for pair in zip(settlements, futures, strict=True)]

    @staticmethod
    def _answer(settlement: Settlement, done: Future[Settled]) -> Settled | SettlementRejected | LedgerUnavailable:
        error = done.exception()
        if error is None:
            return done.result()
        if isinstance(error, SettlementRefused):
            return error.rejected
        if isinstance(error, LedgerUnavailable):
            return error
        # The committer has tried it alone: it upsets the database by itself, and would do so again and again
        # together with whatever else is to be settled.
        reason = f"the ledger failed on it: {type(error).__name__}"
        return SettlementRejected(settlement.request_id, Refusal.INVALID, reason)

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Runs one operation of the ledger; a LedgerError is returned, not raised, so that it crosses unwrapped."""
        if operation not in OPERATIONS:
            raise ValueError(f"no such operation: {operation}")
        try:
            return await asyncio.to_thread(getattr(self._ledger, operation), **arguments)
        except LedgerError as error:
            return error

    async def close(self) -> None:
        """Commits what is waiting, and ends what `start` began."""
        self._closing.set()
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
        await asyncio.to_thread(self._committer.close)
        await asyncio.to_thread(self._ledger.close)

    async def _tidy_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tidy_every_s):
                    await self._closing.wait()
                    return
            await self._tidy(self._ledger.expire_grants)
            await self._tidy(self._ledger.prune_replies)

    async def _tidy(self, work: Callable[[], int]) -> None:
        """Repeats what takes away a bounded number at a time, so that settlements get their turn in between."""
        try:
            gone = 1
            while gone and not self._closing.is_set():
                gone = await asyncio.to_thread(work)
        except LedgerUnavailable as error:
            logger.warning("the ledger could not be tidied, next try in %g s: %s", self._tidy_every_s, error)
        except Exception:
            logger.exception("the ledger could not be tidied, next try in %g s", self._tidy_every_s)
