"""What a payment provider reports, and what the books make of it. Amounts are nano-units."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command


@dataclass(frozen=True, slots=True)
class Paid:
    """Money has come. `reference` is the provider's name of the payment, which is booked once."""

    account_id: str
    amount: int
    currency: str
    reference: str
    attempt_id: str = ""  # of recharging; empty: a person has paid


@dataclass(frozen=True, slots=True)
class Saved:
    """A payment method was saved for recharging. All but the account and its setup are the provider's ids."""

    account_id: str
    setup_id: str
    customer: str
    method: str


@dataclass(frozen=True, slots=True)
class Returned:
    """Money has gone back: a refund, or a chargeback, which the customer's bank has ordered."""

    account_id: str
    amount: int
    reference: str  # of this return
    is_chargeback: bool = False


@dataclass(frozen=True, slots=True)
class ReturnPayment(Command[int]):
    """Takes money that went back from what the account has paid in. Returns the nano-units that were spent already.

    The same idempotency key takes it once, and then returns 0 and changes nothing. A chargeback also suspends the
    account and turns recharging off; a refund pauses recharging, which would take the money again at once. Raises
    AccountNotFound, InvalidAmount.
    """

    account_id: str
    amount: int
    idempotency_key: str
    audit: Audit
    is_chargeback: bool = False
