"""Data for statements and invoices: the account's details, its payments, and the seller."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contracts.books import Audit, Movement
from serve_app.contracts.commands import Command

MAX_PAYMENTS = 100
MAX_ADDRESS_LINES = 6


@dataclass(frozen=True, slots=True)
class Seller:
    """The issuer of statements and invoices. `font` is the path of a TrueType file."""

    name: str
    address: str = ""  # one or more lines
    tax_id: str = ""
    email: str = ""
    font: str | None = None


@dataclass(frozen=True, slots=True)
class BillingDetails:
    """An account's details for invoices. A detail that was not given is empty."""

    company: str = ""
    address: str = ""  # up to MAX_ADDRESS_LINES lines
    tax_id: str = ""
    email: str = ""


@dataclass(frozen=True, slots=True)
class ReadBillingDetails(Command[BillingDetails]):
    """Returns an account's details for invoices. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class SetBillingDetails(Command[BillingDetails]):
    """Replaces an account's details. Raises AccountNotFound, InvalidValue."""

    account_id: str
    details: BillingDetails
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListPayments(Command[list[Movement]]):
    """Returns up to MAX_PAYMENTS payments of an account, newest first. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class FindPayment(Command[Movement | None]):
    """Returns a payment of the account by the number of its journal entry. Raises AccountNotFound."""

    account_id: str
    entry_id: int
