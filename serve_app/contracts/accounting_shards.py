"""Client for all accounting processes. They share one ledger, so each process can run any command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.calls import Unavailable, shard_of
from serve_app.contracts.commands import Answer, Command, FindUnsettled
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.ports import AccountingPort

SETTLE_TIMEOUT_S: Final = 30.0  # for a batch in one accounting process, which allows a commit the same time


class AccountingShards:
    """Implements BooksPort over the shards.

    A command for an account goes first to the account's shard. Other commands and batches of settlements go first to
    the shard that last answered one of them, initially to shard `first`. If a shard is unavailable, the next one is
    tried. A process on a lost machine does not answer at all: if the caller cancels a command there, later commands
    without an account go to the next shard.
    """

    def __init__(self, shards: Sequence[AccountingPort], *, first: int = 0) -> None:
        self.shards = tuple(shards)
        self._last = first % len(self.shards)

    async def run(self, command: Command[Answer]) -> Answer:
        account_id = getattr(command, "account_id", None)
        for index in self._beginning_with(shard_of(account_id, len(self.shards)) if account_id else self._last):
            try:
                answer = await self.shards[index].run(command)
            except (LedgerUnavailable, Unavailable) as error:
                failure = error
                continue
            except asyncio.CancelledError:
                self._pass_over(index)
                raise
            if not account_id:
                self._last = index
            return answer
        raise failure

    async def settle(self, batch: list[Settlement]) -> list[Settled | SettlementRejected]:
        """Settles a batch for any accounts. Raises Unavailable if the outcome of the whole batch is unknown."""
        for index in self._beginning_with(self._last):
            try:
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    answers = await self.shards[index].settle(batch)
            except (Unavailable, TimeoutError) as error:
                failure = Unavailable(f"accounting shard {index}: {type(error).__name__}: {error}")
                continue
            self._last = index
            settled: list[Settled | SettlementRejected] = []
            for answer in answers:
                if isinstance(answer, LedgerUnavailable):  # other shards would fail too: all use one database
                    raise Unavailable(str(answer))
                settled.append(answer)
            return settled
        raise failure

    async def unsettled(self, request_ids: tuple[str, ...]) -> list[str]:
        """Returns the given request ids that the ledger has neither settled nor kept as stuck."""
        return await self.run(FindUnsettled(request_ids))

    def _beginning_with(self, first: int) -> list[int]:
        return [(first + number) % len(self.shards) for number in range(len(self.shards))]

    def _pass_over(self, index: int) -> None:
        if index == self._last:
            self._last = (index + 1) % len(self.shards)
