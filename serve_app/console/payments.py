"""Defines the interface of payment providers, and books their reports in the ledger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import AddCredit, GetAccount
from serve_app.contracts.payments import Paid, Returned, ReturnPayment, Saved
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.recharges import Attempt, AttemptState, RecordOutcome, SaveMethod, ShowRecharge
from serve_app.contracts.units import DAY_S

logger = logging.getLogger("ray.serve")

#: For this many seconds after a return was first reported, its payment may still be reported. Until then, `book` raises
#: EarlyReport, and the provider repeats the report of the return. After that, the return is left to an operator.
EARLY_S: Final = DAY_S


class PaymentError(Exception):
    """The provider refuses or is unavailable. The message is for the account's holder, without operator details."""


class BadReport(Exception):
    """A report that does not come from the provider, can't be parsed, or does not fit the account."""


class EarlyReport(Exception):
    """The return of a payment was reported before the payment itself: the provider must repeat the report."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The provider's record of an attempt's payment. `open`: the payment is still in progress."""

    state: AttemptState
    error: str = ""  # reason for a failure, shown to the account's holder
    paid: Paid | None = None  # the payment, after a success


class PaymentProvider(Protocol):
    name: str
    page: str  # origin of the provider's pages, for a Content-Security-Policy
    min_amount: int  # minimum payment in nano-units; 0: no minimum

    def check(self, amount: int, currency: str) -> None:
        """Raises PaymentError for an amount or currency that the provider does not accept in one payment."""

    async def checkout(self, account_id: str, amount: int, currency: str, back: str) -> str:
        """Returns the URL of a page to pay `amount` nano-units, which then redirects to `back`. Raises PaymentError."""

    async def save_method(self, account_id: str, setup_id: str, customer: str | None, currency: str, back: str) -> str:
        """Returns the URL of a page to save a payment method. `customer` is None for a new one. Raises PaymentError."""

    async def find(self, attempt: Attempt) -> Charge | None:
        """Returns the payment of an attempt, None if there is none. Raises PaymentError if that is unknown."""

    async def charge(self, attempt: Attempt) -> Charge:
        """Orders the payment of an attempt. Raises PaymentError if it is unknown whether it was ordered."""

    async def forget(self, method: str) -> None:
        """Removes a payment method at the provider. Raises PaymentError."""

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Paid | Returned | Saved | None:
        """Parses a report. None: it does not concern this service. Raises BadReport, PaymentError."""


async def book(books: BooksPort, provider: PaymentProvider, report: Paid | Returned | Saved, now: float = 0.0) -> None:
    """Books a report in the ledger, once for each reference, however often it is reported.

    Raises EarlyReport, and BadReport for a payment in another currency than the account's.
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
        if report.attempt_id:  # last: while the attempt is open, no other recharge begins
            await books.run(RecordOutcome(report.attempt_id, "succeeded", "", audit, report, provider.name))
        return
    before = (await books.run(ShowRecharge(report.account_id)))[0] if report.kind == "chargeback" else None
    reverses = f"{provider.name} {report.reverses}"
    final = now - report.reported_at > EARLY_S
    command = ReturnPayment(report.account_id, report.amount, key, reverses, audit, report.kind, final)
    lost = await books.run(command)
    if lost is None and not final:
        raise EarlyReport(f"{key} comes before {reverses}")
    if lost is None:
        logger.error(
            "%s of %s: %s is not booked. Correct the balance by hand; the audit log has the amount.",
            key, report.account_id, reverses,
        )  # fmt: skip
    if lost:
        logger.warning("%s: %d nano-units of %s were spent already", key, lost, report.account_id)
    if before is not None and before.method is not None:
        after, _ = await books.run(ShowRecharge(report.account_id))
        # A repeated report removes no method from the ledger, so nothing is forgotten.
        if after is not None and after.method is None:
            await forget(provider, before.method)


async def forget(provider: PaymentProvider, method: str | None) -> None:
    """Removes a method at the provider. One try is enough: the ledger no longer has it, so nothing charges it."""
    if method is None:
        return
    try:
        await provider.forget(method)
    except PaymentError as error:
        logger.warning("%s keeps the payment method %s, remove it there: %s", provider.name, method, error)
