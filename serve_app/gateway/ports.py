"""What the gateway needs of the other parts, as protocols: Ray handles in the service, plain objects in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from serve_app.backend.messages import BackendEvent, GenerateCall
from serve_app.ledger.errors import LedgerUnavailable
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected
from serve_app.limits.messages import Admit, Grant, OpenHold, Release


class BackendUnavailable(Exception):
    """No replica took the request, or the one that did has died."""


SettleAnswer = Settled | SettlementRejected | LedgerUnavailable


class LimiterPort(Protocol):
    """Authentication, rate limits and holds. Every ask is idempotent by its request id."""

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        """One answer for each of Admit, Adjust, Release, Renew, Announce, Identify and Status, in order."""


class LimiterClient(Protocol):
    """This gateway's side of the limiter: serve_app.gateway.leases of one shard, or shards.LimiterShards of all."""

    holder: str  # under whose lease the holds of this gateway live

    @property
    def admit_timeout_s(self) -> float:
        """How long a limiter that is restarting is waited for, in seconds."""

    @property
    def disagreement(self) -> str | None:
        """Why nothing is let in: this gateway or another one does not count the limiter shards that there are."""

    async def ask(self, ask: Any) -> Any:
        """The limiter's answer to an Admit, Adjust, Identify or Status. Raises Unavailable."""

    def opened(self, admit: Admit, grant: Grant) -> None:
        """Keeps the grant's hold alive from here on."""

    def adopt(self, holds: Sequence[OpenHold]) -> None:
        """Keeps holds of a gateway that died alive from here on; they are announced before anything else is asked."""

    def release(self, release: Release) -> None:
        """Ends the hold. Never fails and never waits."""


class AccountingPort(Protocol):
    """The ledger's single writer."""

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """Durable when it returns; idempotent by request id.

        LedgerUnavailable in the place of an answer: unknown whether settled, ask again with the same id.
        """

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """An account, key or usage operation by name; raises LedgerError, or Unavailable."""


class BackendPort(Protocol):
    """The model applications."""

    def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Streams one reply; closing the generator cancels it. Raises BackendUnavailable."""

    async def fingerprint(self, backend: str) -> str:
        """What tells the weights of a backend, as Started tells those of a reply. Raises BackendUnavailable."""

    async def status(self) -> dict[str, dict[str, Any]]:
        """Status and number of running replicas of each application. Raises BackendUnavailable."""


class Metrics(Protocol):
    """What the gateway counts. Never an account or a key as a label."""

    def request(self, model: str, status: int, seconds: float) -> None:
        """One request has been answered; 499 stands for a client that went away."""

    def refusal(self, reason: str) -> None:
        """One request has been refused, by error code."""

    def first_token(self, model: str, seconds: float) -> None:
        """From the request's arrival to its first token."""

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """Tokens of one billed request."""

    def settlement(self, outcome: str, seconds: float) -> None:
        """One settlement has become durable, or was refused."""
