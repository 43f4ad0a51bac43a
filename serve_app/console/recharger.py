"""Watches the accounts with automatic recharging, and follows each attempt to its end.

An attempt is in the ledger before its payment is ordered. If the outcome is unknown, the attempt stays open. Before
the recharger orders the payment again, it looks for the payment at the provider. It orders again only under the same
idempotency key, and only while the provider keeps that key. If the outcome stays unknown for longer, the attempt stays
open; the ledger then pauses recharging and sends a notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from serve_app.console.payments import BadReport, Charge, PaymentError, PaymentProvider, book
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable, repeat
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.recharges import (
    Attempt,
    BeginRecharge,
    ClaimAttempt,
    ListDueAttempts,
    RecordOutcome,
    WatchRecharges,
)

logger = logging.getLogger("ray.serve")

EVERY_S: Final = 5.0
AT_ONCE: Final = 8
AUDIT: Final = Audit("recharge")


class Recharger:
    """Recharges accounts. Any number of processes may watch one ledger."""

    def __init__(self, books: BooksPort, provider: PaymentProvider) -> None:
        self._books = books
        self._provider = provider
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await repeat(self.turn, EVERY_S, "accounts could not be recharged")

    async def turn(self) -> None:
        """Checks the open attempts and the accounts with a low balance once."""
        run, name = self._books.run, self._provider.name
        due, low = await run(ListDueAttempts(name)), list[str]()
        after: str | None = ""
        while after is not None:
            found, after = await run(WatchRecharges(name, after))
            low += found
        work = [self._go_on(attempt) for attempt in due] + [self._begin(account_id) for account_id in low]
        await asyncio.gather(*map(self._alone, work))

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one task. Its failure does not stop the others."""
        async with self._slots:
            try:
                await work
            except (Unavailable, LedgerError, BadReport) as error:
                logger.warning("a recharge waits: %s", error)

    async def _begin(self, account_id: str) -> None:
        attempt = await self._books.run(BeginRecharge(account_id, self._provider.name, AUDIT))
        if attempt is None:
            return
        try:
            charge = await self._provider.charge(attempt)
        except PaymentError as error:
            charge = Charge("open", str(error))
        await self._record(attempt, charge)

    async def _go_on(self, attempt: Attempt) -> None:
        claim = await self._books.run(ClaimAttempt(attempt.attempt_id, attempt.tries))
        if claim is None:
            return
        try:
            charge = await self._provider.find(attempt)
            if charge is None:
                charge = Charge("failed", claim.refusal) if claim.refusal else await self._provider.charge(attempt)
        except PaymentError as error:
            charge = Charge("open", str(error))
        await self._record(attempt, charge)

    async def _record(self, attempt: Attempt, charge: Charge) -> None:
        if charge.paid is not None:
            try:
                await book(self._books, self._provider, charge.paid)
            except LedgerUnavailable:
                raise
            except (BadReport, LedgerError) as error:
                logger.warning("the payment of %s can't be credited: %s", attempt.attempt_id, error)
                charge = Charge("open", "The payment was made and can't be credited yet.")
            else:
                return
        logger.warning(
            "recharge %s of %s is %s: %s", attempt.attempt_id, attempt.account_id, charge.state, charge.error
        )
        await self._books.run(RecordOutcome(attempt.attempt_id, charge.state, charge.error, AUDIT))
