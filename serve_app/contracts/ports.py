"""Protocols by which a process uses the others: Ray handles in the service, plain objects in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.commands import Answer, Command
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.generation import BackendEvent, GenerateCall, Rejected, TokenizeCall, Tokenized
from serve_app.contracts.served import Backend


class BackendUnavailable(Exception):
    """No replica took the request, or the replica that took it has died."""


SettleAnswer = Settled | SettlementRejected | LedgerUnavailable


class LimiterPort(Protocol):
    """Interface for authentication, rate limits and holds. Every ask is idempotent by its request id."""

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        """Returns one answer for each ask (`limiting.Ask`), in order."""


class BooksPort(Protocol):
    """Interface to the operations on the ledger."""

    async def run(self, command: Command[Answer]) -> Answer:
        """Returns the command's answer. Raises the LedgerErrors that the command names, and Unavailable."""


class AccountingPort(BooksPort, Protocol):
    """Interface to one accounting process."""

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """Settles durably before it returns; idempotent by request id.

        If an answer is LedgerUnavailable, it is unknown whether that settlement was committed. Settle it again with the
        same id.
        """


class BackendPort(Protocol):
    """Interface to the model applications."""

    async def generate(self, backend: str, call: GenerateCall, take: Callable[[BackendEvent], None]) -> None:
        """Passes each event of one reply to `take` as it arrives. Cancelling this call ends the reply.

        Raises BackendUnavailable, also if the events end before Finished or Rejected.
        """

    async def tokenize(self, backend: str, call: TokenizeCall) -> Tokenized | Rejected:
        """Returns tokens or their text, from any replica of a backend. Raises BackendUnavailable."""

    async def fingerprint(self, backend: str) -> str:
        """Returns the fingerprint of a backend's weights, the same as in Started. Raises BackendUnavailable."""

    async def status(self) -> dict[str, dict[str, Any]]:
        """Returns for each application its `status`, the number of running `replicas`, and Serve's `message`.

        Raises BackendUnavailable.
        """


class ApplicationsPort(Protocol):
    """Starts and stops applications besides those in the configuration. Any gateway may do so at any time."""

    async def deploy(self, backend: Backend) -> None:
        """Starts a backend without waiting until it runs; harmless to repeat. Raises BackendUnavailable."""

    async def delete(self, backend: Backend) -> None:
        """Stops a backend once its running replies have ended; harmless to repeat. Raises BackendUnavailable.

        An application of that name in the configuration stays.
        """
