"""Usage accounting on Ray Serve: shards of one replica each, which write one ledger.

The ledger orders its writers by itself; one process for an account's settlements is what lets many go in one commit.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.priority import yield_to_models
from serve_app.gateway.accounting import AccountingService
from serve_app.gateway.direct import Server
from serve_app.ledger import Ledger, LedgerUnavailable
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected
from serve_app.settings import GatewayArgs


@serve.deployment(
    name="Accounting",
    num_replicas=1,
    max_ongoing_requests=1000,
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Accounting:
    """Ray's side of serve_app.gateway.accounting."""

    def __init__(self, settings: GatewayArgs) -> None:
        yield_to_models()
        self._service = AccountingService(Ledger(settings.ledger_url()))
        self._service.start()
        self._server = Server({"settle": self.settle, "call": self.call})

    async def address(self) -> str | None:
        """Where processes of this machine reach this one without Serve; see serve_app.gateway.line."""
        return await self._server.address()

    async def settle(self, settlements: list[Settlement]) -> list[Settled | SettlementRejected | LedgerUnavailable]:
        """See AccountingService."""
        return await self._service.settle(settlements)

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """See AccountingService."""
        return await self._service.call(operation, arguments)

    async def __del__(self) -> None:
        """Commits what is waiting."""
        await self._service.close()
        self._server.close()
