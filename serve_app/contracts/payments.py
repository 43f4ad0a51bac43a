"""Reports of a payment provider, and the commands that book them. Amounts are nano-units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command


@dataclass(frozen=True, slots=True)
class Paid:
    """A payment was received. `reference` is the provider's id of the payment, under which it is booked once."""

    account_id: str
    amount: int
    currency: str
    reference: str
    attempt_id: str = ""  # id of the recharge attempt; empty: a person paid
    created_at: float = 0.0  # when the payment of a recharge attempt was ordered


@dataclass(frozen=True, slots=True)
class Saved:
    """A payment method was saved for recharging. `customer` and `method` are the provider's ids."""

    account_id: str
    setup_id: str
    customer: str
    method: str


#: A chargeback is a refund that the customer's bank has ordered. A reinstatement reverses a chargeback, if the bank
#: decides for the seller.
ReturnKind = Literal["refund", "chargeback", "reinstatement"]


@dataclass(frozen=True, slots=True)
class Returned:
    """A payment was refunded or charged back, or a chargeback was reversed."""

    account_id: str
    amount: int
    reference: str  # id of this return
    reverses: str  # reference of the payment, or of the chargeback that is reversed
    kind: ReturnKind = "refund"
    reported_at: float = 0.0  # when the provider first reported it


@dataclass(frozen=True, slots=True)
class ReturnPayment(Command[int | None]):
    """Deducts returned money from the account's top-ups. Returns the nano-units that it could not deduct.

    A repetition with the same idempotency key returns 0 and changes nothing. If the payment or chargeback that it
    reverses is not booked, the command moves no money and returns None. With `final`, it then records the return in the
    audit log, once, so that an operator can correct the balance.

    A chargeback also suspends the account and turns recharging off. A refund pauses recharging, which would otherwise
    charge the money again at once. A reinstatement gives back only the money that its chargeback deducted. The account
    stays suspended. Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    amount: int
    idempotency_key: str
    reverses: str  # idempotency key of the payment, or of the chargeback
    audit: Audit
    kind: ReturnKind = "refund"
    final: bool = False  # a report of the payment itself is no longer expected
