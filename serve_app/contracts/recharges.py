"""Recharging: tops up an account automatically with a saved payment method. Defines its settings and its attempts.

Amounts are nano-units, times Unix seconds. Only the provider's ids of a payment method are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command
from serve_app.contracts.payments import Paid

#: Seconds between the end of an attempt and the account's next attempt.
BETWEEN_S: Final = 60.0
#: Seconds until each next check of an attempt with an unknown outcome. The last value applies to all later checks.
AGAIN_S: Final = (120.0, 300.0, 900.0, 3600.0)
#: Seconds after an attempt's beginning during which its payment may be ordered. Stripe keeps an idempotency key for at
#: least 24 hours: a later order under the same key could be a second payment.
ORDER_S: Final = 23 * 3600.0

RechargeState = Literal["off", "on", "paused"]
AttemptState = Literal["open", "succeeded", "failed"]


@dataclass(frozen=True, slots=True)
class Recharge:
    """An account's settings."""

    account_id: str
    threshold: int  # recharge at or below this balance
    amount: int
    monthly_cap: int  # per month in UTC
    state: RechargeState
    reason: str  # why recharging is paused
    provider: str  # the company that issued `customer` and `method`
    customer: str | None
    method: str | None
    setup_id: str | None  # set while a method is being saved
    next_at: float  # earliest start of the next attempt
    counted: int  # nano-units of this month's attempts that are not known to have failed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One payment. Amount, payer and payment method are as they were when the attempt began."""

    attempt_id: str  # also the payment's idempotency key
    account_id: str
    amount: int
    currency: str
    provider: str
    customer: str
    method: str
    created_at: float
    period: str  # YYYY-MM in UTC; the attempt counts towards this month's cap
    state: AttemptState  # open: outcome unknown
    error: str
    tries: int
    next_at: float | None  # when an open attempt is checked again


@dataclass(frozen=True, slots=True)
class Claim:
    """An open attempt that the caller owns for some minutes. `refusal`: why its payment can no longer be ordered."""

    attempt: Attempt
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SetRecharge(Command[Recharge]):
    """Sets threshold, amount and monthly cap. Changes neither the state of recharging nor an open attempt.

    Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    threshold: int
    amount: int
    monthly_cap: int
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AskMethod(Command[Recharge]):
    """Begins a setup that saves a payment method. Until it is saved, a repetition returns the same `setup_id`.

    Raises AccountNotFound, and Conflict if the account has no settings.
    """

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SaveMethod(Command[str | None]):
    """Saves a setup's payment method and turns recharging on. A setup can be used once.

    Returns a method that is no longer needed, if any: the replaced method, or the new one if the setup has ended.
    """

    account_id: str
    setup_id: str
    provider: str
    customer: str
    method: str
    audit: Audit


@dataclass(frozen=True, slots=True)
class ResumeRecharge(Command[Recharge]):
    """Resumes recharging after a pause. Raises AccountNotFound, and Conflict if recharging is off."""

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class StopRecharge(Command[str | None]):
    """Turns recharging off, removes customer and method, and returns the method. Harmless to repeat."""

    account_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ShowRecharge(Command[tuple[Recharge | None, list[Attempt]]]):
    """Returns an account's settings, or None if it has none, and up to 20 latest attempts. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class WatchRecharges(Command[tuple[list[str], str | None]]):
    """Checks up to 200 accounts after an id. Returns those to recharge now, and where to continue, None at the end."""

    provider: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class BeginRecharge(Command[Attempt | None]):
    """Begins an attempt if the account still needs a recharge; otherwise returns None. The caller orders the payment.

    The account must be active, its balance must be at or below the threshold, no attempt may be open, and this month's
    cap must have room.
    """

    account_id: str
    provider: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListDueAttempts(Command[list[Attempt]]):
    """Returns up to 100 open attempts that are due for a check, oldest first."""

    provider: str


@dataclass(frozen=True, slots=True)
class ClaimAttempt(Command[Claim | None]):
    """Claims an open attempt for the caller, which then checks whether it was paid.

    Returns None if another process was faster or the attempt has ended.
    """

    attempt_id: str
    tries: int  # as the caller has read it; if it differs now, another process was faster


@dataclass(frozen=True, slots=True)
class EndAttempt(Command[None]):
    """Records that an attempt has failed, because an operator saw at the provider that it was not paid.

    The attempt no longer counts towards the cap. A payment that arrives later is still credited. Raises InvalidValue
    for an attempt that the account does not have, and Conflict if it has ended, or while its payment may still be
    ordered.
    """

    account_id: str
    attempt_id: str
    audit: Audit


@dataclass(frozen=True, slots=True)
class RecordOutcome(Command[None]):
    """Records the outcome of an attempt. The state `open` means that it is still unknown. Harmless to repeat.

    A success is final, and may also follow a failure. A failure pauses recharging and creates notices for the owners,
    the billing members, and the targets of the account's balance alerts. An outcome that is still unknown when the
    payment may no longer be ordered has the same effect.

    `paid` is the provider's report of a success. If a restored ledger lacks the attempt, the attempt is recorded from
    `paid`, so that it counts towards its month's cap. Without `paid`, an unknown attempt is ignored.
    """

    attempt_id: str
    state: AttemptState
    error: str
    audit: Audit | None = None
    paid: Paid | None = None
    provider: str = ""  # provider of `paid`
