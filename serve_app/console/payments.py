"""How accounts pay: what a payment provider must do, and how its reports become entries of the ledger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import AddCredit, GetAccount
from serve_app.contracts.payments import Paid, Returned, ReturnPayment
from serve_app.contracts.ports import BooksPort

logger = logging.getLogger("ray.serve")


class PaymentError(Exception):
    """The provider refuses, or is away: the message is for the account's holder."""


class BadReport(Exception):
    """A report that does not come from the provider, or can't be read."""


class PaymentProvider(Protocol):
    """A company that takes money."""

    name: str
    page: str  # where its own pages are, as a source of a Content-Security-Policy

    async def checkout(self, account_id: str, amount: int, currency: str, back: str) -> str:
        """The address of a page where `amount` nano-units are paid, which leads `back`. Raises PaymentError."""

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | None:
        """What a report says, None if nothing of interest. Raises BadReport, PaymentError."""


async def book(books: BooksPort, provider: str, report: Paid | Returned) -> None:
    """Into the ledger, once for each reference, however often it is reported."""
    audit = Audit(provider)
    key = f"{provider} {report.reference}"
    if isinstance(report, Paid):
        account = await books.run(GetAccount(report.account_id))
        if account.currency != report.currency:
            raise BadReport(f"{report.reference} is in {report.currency}, {account.account_id} in {account.currency}")
        memo = f"{provider} {report.reference}"
        await books.run(AddCredit(report.account_id, report.amount, idempotency_key=key, memo=memo, audit=audit))
        return
    lost = await books.run(ReturnPayment(report.account_id, report.amount, key, audit, report.is_chargeback))
    if lost:
        logger.warning("%s: %d nano-units of %s were spent already", key, lost, report.account_id)
