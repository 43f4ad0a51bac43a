"""What one process needs of the others, as protocols: Ray handles in the service, plain objects in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.commands import Answer, Command
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.generation import BackendEvent, GenerateCall
from serve_app.contracts.served import Backend


class BackendUnavailable(Exception):
    """No replica took the request, or the one that did has died."""


SettleAnswer = Settled | SettlementRejected | LedgerUnavailable


class LimiterPort(Protocol):
    """Authentication, rate limits and holds. Every ask is idempotent by its request id."""

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        """One answer for each of Admit, Adjust, Release, Renew, Announce, Identify and Status, in order."""


class BooksPort(Protocol):
    """The operations on the books."""

    async def run(self, command: Command[Answer]) -> Answer:
        """The command's answer. Raises LedgerError as the command says, and Unavailable."""


class AccountingPort(BooksPort, Protocol):
    """One accounting process."""

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """Durable when it returns; idempotent by request id.

        LedgerUnavailable in the place of an answer: unknown whether settled, ask again with the same id.
        """


class BackendPort(Protocol):
    """The model applications."""

    def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """Streams one reply; closing the generator cancels it. Raises BackendUnavailable."""

    async def fingerprint(self, backend: str) -> str:
        """The fingerprint of a backend's weights, the same as in Started. Raises BackendUnavailable."""

    async def status(self) -> dict[str, dict[str, Any]]:
        """Of each application `status`, the number of running `replicas`, and Serve's `message`.

        Raises BackendUnavailable.
        """


class ApplicationsPort(Protocol):
    """Starts and stops applications beside those of the configuration. Any gateway may do that at any time."""

    async def deploy(self, backend: Backend) -> None:
        """Starts a backend and does not wait until it runs; harmless to repeat. Raises BackendUnavailable."""

    async def delete(self, backend: Backend) -> None:
        """Stops a backend once the replies that run have ended; harmless to repeat. Raises BackendUnavailable.

        An application of that name that the configuration declares stays.
        """
