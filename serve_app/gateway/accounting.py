"""The accounting process without Ray: the ledger's single writer. All its state is in the database."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from serve_app.ledger import Ledger, LedgerError, LedgerUnavailable, SettlementRefused
from serve_app.ledger.group_commit import GroupCommitter
from serve_app.ledger.messages import Refusal, Settled, Settlement, SettlementRejected

logger = logging.getLogger("ray.serve")

OPERATIONS = frozenset(
    {
        "create_account", "list_accounts", "get_account", "set_limits", "set_active", "credit", "create_key",
        "list_keys", "revoke_key", "find_key", "changes", "usage", "check",
    }
)  # fmt: skip


class AccountingService:
    """Settles usage and runs account operations on one ledger."""

    def __init__(self, ledger: Ledger, *, give_up_after_s: float = 5.0) -> None:
        self._ledger = ledger
        self._committer = GroupCommitter(ledger.settle, give_up_after_s=give_up_after_s)

    async def settle(self, settlements: list[Settlement]) -> list[Settled | SettlementRejected | LedgerUnavailable]:
        """Durable when it returns. What waits together is committed together.

        LedgerUnavailable in the place of an answer: unknown whether settled, ask again with the same id.
        """
        return await asyncio.gather(*(self._settle(settlement) for settlement in settlements))

    async def _settle(self, settlement: Settlement) -> Settled | SettlementRejected | LedgerUnavailable:
        try:
            return await asyncio.wrap_future(self._committer.submit(settlement))
        except SettlementRefused as error:
            return error.rejected
        except LedgerUnavailable as error:
            return error
        except Exception as error:
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
        """Commits what is waiting."""
        await asyncio.to_thread(self._committer.close)
        await asyncio.to_thread(self._ledger.close)
