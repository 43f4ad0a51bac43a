"""What a payment provider reports, and what the books make of it. Amounts are nano-units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    created_at: float = 0.0  # of a payment of recharging: when it was ordered


@dataclass(frozen=True, slots=True)
class Saved:
    """A payment method was saved for recharging. All but the account and its setup are the provider's ids."""

    account_id: str
    setup_id: str
    customer: str
    method: str


#: A chargeback is a refund that the customer's bank has ordered. A reinstatement brings its money to us again, when the
#: bank has decided so.
ReturnKind = Literal["refund", "chargeback", "reinstatement"]


@dataclass(frozen=True, slots=True)
class Returned:
    """Money has gone back, or has come again."""

    account_id: str
    amount: int
    reference: str  # of this return
    reverses: str  # the reference of the payment, or that of the chargeback which is reinstated
    kind: ReturnKind = "refund"


@dataclass(frozen=True, slots=True)
class ReturnPayment(Command[int | None]):
    """Takes money that went back from what the account has paid in. Returns the nano-units that were spent already.

    The same idempotency key takes it once, and then returns 0 and changes nothing. None: what it reverses is not booked
    yet, and nothing is changed. A chargeback also suspends the account and turns recharging off; a refund pauses
    recharging, which would take the money again at once. A reinstatement gives back what its chargeback has taken, less
    what that could not take; the account stays suspended. Raises AccountNotFound, InvalidAmount.
    """

    account_id: str
    amount: int
    idempotency_key: str
    reverses: str  # the idempotency key of the payment, or that of the chargeback
    audit: Audit
    kind: ReturnKind = "refund"
