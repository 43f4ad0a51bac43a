"""Usage accounting: the ledger's single writer. All its state is in the database, so a restart loses nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve

from serve_app.ledger import Ledger, LedgerError, LedgerUnavailable, SettlementRefused
from serve_app.ledger.group_commit import GroupCommitter
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected
from serve_app.settings import GatewayArgs

logger = logging.getLogger("ray.serve")

OPERATIONS = frozenset(
    {
        "create_account", "list_accounts", "get_account", "set_limits", "set_active", "credit", "create_key",
        "list_keys", "revoke_key", "find_key", "changes", "usage", "check",
    }
)  # fmt: skip


@serve.deployment(
    name="Accounting",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Accounting:
    """Settles usage and runs account operations on one database."""

    def __init__(self, settings: GatewayArgs) -> None:
        self._ledger = Ledger(settings.ledger_url())
        self._committer = GroupCommitter(self._ledger.settle)

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

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Runs one operation of the ledger; a LedgerError is returned, not raised, so that it crosses unwrapped."""
        if operation not in OPERATIONS:
            raise ValueError(f"no such operation: {operation}")
        try:
            return await asyncio.to_thread(getattr(self._ledger, operation), **arguments)
        except LedgerError as error:
            return error

    async def __del__(self) -> None:
        """Commits what is waiting."""
        await asyncio.to_thread(self._committer.close)
        await asyncio.to_thread(self._ledger.close)
