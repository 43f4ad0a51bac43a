"""Recharging: an account that is topped up by itself with a saved payment method. Its settings, and its attempts.

Amounts are nano-units, times Unix seconds. Of a payment method there are the provider's ids alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.payments import Paid

#: Seconds from the end of an attempt to the account's next one.
BETWEEN_S: Final = 60.0
#: Seconds until an attempt whose outcome is not known is looked at again, by how often it was; the last one repeats.
AGAIN_S: Final = (120.0, 300.0, 900.0, 3600.0)
#: Seconds from an attempt's beginning in which its payment may be ordered. Stripe forgets an idempotency key after 24
#: hours at the earliest: later, a second order under the same key could be a second payment.
ORDER_S: Final = 23 * 3600.0

RechargeState = Literal["off", "on", "paused"]
AttemptState = Literal["open", "succeeded", "failed"]


@dataclass(frozen=True, slots=True)
class Recharge:
    """An account's settings."""

    account_id: str
    threshold: int  # the balance at or below which it is recharged
    amount: int
    monthly_cap: int  # of a month of UTC
    state: RechargeState
    reason: str  # why it is paused
    provider: str  # the company that has customer and method
    customer: str | None
    method: str | None
    setup_id: str | None  # of a method that somebody is about to save
    next_at: float  # no attempt begins before
    counted: int  # this month's attempts that are not known to have failed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One payment. What is to be paid, by whom and with what is as it was when it began."""

    attempt_id: str  # also the payment's idempotency key
    account_id: str
    amount: int
    currency: str
    provider: str
    customer: str
    method: str
    created_at: float
    period: str  # YYYY-MM of UTC, to whose cap it counts
    state: AttemptState  # open: not known yet
    error: str
    tries: int
    next_at: float | None  # when an open one is looked at again


@dataclass(frozen=True, slots=True)
class Claim:
    """An open attempt that is the caller's for some minutes. `refusal`: why its payment is not ordered any more."""

    attempt: Attempt
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SetRecharge(Command[Recharge]):
    """Sets amounts; recharging stays on, off or paused. An open attempt stays as it began.

    Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    threshold: int
    amount: int
    monthly_cap: int
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AskMethod(Command[Recharge]):
    """A payment method is about to be saved under `setup_id`. Until one is, a repetition returns the same id.

    Raises AccountNotFound, and Conflict when the account has no settings.
    """

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SaveMethod(Command[str | None]):
    """Saves the method of a setup and turns recharging on; a setup is used once. Returns a method that is of no use
    any more.
    """

    account_id: str
    setup_id: str
    provider: str
    customer: str
    method: str
    audit: Audit


@dataclass(frozen=True, slots=True)
class ResumeRecharge(Command[Recharge]):
    """After a pause. Raises AccountNotFound, and Conflict when recharging is off."""

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class StopRecharge(Command[str | None]):
    """Turns recharging off and removes customer and method; it returns the method. Harmless to repeat."""

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ShowRecharge(Command[tuple[Recharge | None, list[Attempt]]]):
    """An account's settings, None before the first, and its latest attempts, up to 20. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class WatchRecharges(Command[tuple[list[str], str | None]]):
    """Looks at up to 200 accounts after an id: those to be recharged now, and where to go on, None at the end."""

    provider: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class BeginRecharge(Command[Attempt | None]):
    """Begins an attempt, if the account is still to be recharged: it is active, its balance is at or below the
    threshold, no attempt is open, and this month's cap has room. None: it is not. The caller orders the payment.
    """

    account_id: str
    provider: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListDueAttempts(Command[list[Attempt]]):
    """Up to 100 open attempts that are to be looked at again, the oldest first."""

    provider: str


@dataclass(frozen=True, slots=True)
class ClaimAttempt(Command[Claim | None]):
    """Makes an open attempt the caller's, which looks for its payment. None: another process was faster, or it has
    ended.
    """

    attempt_id: str
    tries: int  # as the caller has seen it


@dataclass(frozen=True, slots=True)
class EndAttempt(Command[None]):
    """An operator has seen at the provider that an attempt was not paid: it has failed, and no longer counts to the
    cap. A payment that comes after all is credited.

    Raises InvalidValue for an attempt that the account does not have, and Conflict when it has ended, or while its
    payment may still be ordered.
    """

    account_id: str
    attempt_id: str
    audit: Audit


@dataclass(frozen=True, slots=True)
class RecordOutcome(Command[None]):
    """What became of an attempt; open: still unknown. Harmless to repeat, and for an attempt that is not there.

    A success stands, and comes also after a failure. A failure pauses recharging, and makes a notice to the owners,
    those of billing, and the targets of the account's balance alerts. So does an attempt that is still unknown when its
    payment may not be ordered any more.

    `paid` is what the provider says of a success. From it an attempt is recorded that a restored ledger does not have,
    so that it counts to its month's cap.
    """

    attempt_id: str
    state: AttemptState
    error: str
    audit: Audit | None = None
    paid: Paid | None = None
    provider: str = ""  # of `paid`
