"""How accounts pay: what a payment provider must do, and how its reports become entries of the ledger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import AddCredit, GetAccount
from serve_app.contracts.payments import Paid, Returned, ReturnPayment, Saved
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.recharges import Attempt, AttemptState, RecordOutcome, SaveMethod, ShowRecharge

logger = logging.getLogger("ray.serve")


class PaymentError(Exception):
    """The provider refuses, or is away. The message is for the account's holder: it names nothing of the operator's."""


class BadReport(Exception):
    """A report that does not come from the provider, or can't be read."""


class EarlyReport(Exception):
    """It is about another one that has not come yet: the provider must repeat it."""


@dataclass(frozen=True, slots=True)
class Charge:
    """An attempt's payment as the provider knows it. Open: it is still under way there."""

    state: AttemptState
    error: str = ""  # of one that failed, for the account's holder
    paid: Paid | None = None  # of one that succeeded


class PaymentProvider(Protocol):
    """A company that takes money."""

    name: str
    page: str  # where its own pages are, as a source of a Content-Security-Policy

    def check(self, amount: int, currency: str) -> None:
        """Raises PaymentError for what can't be paid at once."""

    async def checkout(self, account_id: str, amount: int, currency: str, back: str) -> str:
        """The address of a page where `amount` nano-units are paid, which leads `back`. Raises PaymentError."""

    async def save_method(self, account_id: str, setup_id: str, customer: str | None, currency: str, back: str) -> str:
        """The address of a page where a payment method of this or a new customer is saved. Raises PaymentError."""

    async def find(self, attempt: Attempt) -> Charge | None:
        """The payment of an attempt, None if there is none. Raises PaymentError: not known."""

    async def charge(self, attempt: Attempt) -> Charge:
        """Orders the payment of an attempt. Raises PaymentError: not known whether there is one."""

    async def forget(self, method: str) -> None:
        """Removes a payment method there. Raises PaymentError."""

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | Saved | None:
        """What a report says, None if it is of nothing that was begun here. Raises BadReport, PaymentError."""


async def book(books: BooksPort, provider: PaymentProvider, report: Paid | Returned | Saved) -> None:
    """Into the ledger, once for each reference, however often it is reported.

    Raises BadReport, EarlyReport, LedgerError.
    """
    audit = Audit(provider.name)
    if isinstance(report, Saved):
        ids = (provider.name, report.customer, report.method)
        await forget(provider, await books.run(SaveMethod(report.account_id, report.setup_id, *ids, audit)))
        return
    key = f"{provider.name} {report.reference}"
    if isinstance(report, Paid):
        account = await books.run(GetAccount(report.account_id))
        if account.currency != report.currency:
            raise BadReport(f"{report.reference} is in {report.currency}, {account.account_id} in {account.currency}")
        await books.run(AddCredit(report.account_id, report.amount, idempotency_key=key, memo=key, audit=audit))
        if report.attempt_id:  # only now: until its credit is there, the attempt keeps others from beginning
            await books.run(RecordOutcome(report.attempt_id, "succeeded", "", audit, report, provider.name))
        return
    before = (await books.run(ShowRecharge(report.account_id)))[0] if report.kind == "chargeback" else None
    reverses = f"{provider.name} {report.reverses}"
    lost = await books.run(ReturnPayment(report.account_id, report.amount, key, reverses, audit, report.kind))
    if lost is None:
        raise EarlyReport(f"{key} comes before {reverses}")
    if lost:
        logger.warning("%s: %d nano-units of %s were spent already", key, lost, report.account_id)
    if before is not None and before.method is not None:
        after, _ = await books.run(ShowRecharge(report.account_id))
        if after is not None and after.method is None:  # unless it is an old chargeback, reported again
            await forget(provider, before.method)


async def forget(provider: PaymentProvider, method: str | None) -> None:
    """Once and no more: the ledger does not have it any longer, so nothing is ever paid with it."""
    if method is None:
        return
    try:
        await provider.forget(method)
    except PaymentError as error:
        logger.warning("%s keeps the payment method %s, remove it there: %s", provider.name, method, error)
