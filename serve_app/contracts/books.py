"""Immutable data that other processes send to the ledger and receive from it.

Money is integer nano-units (1e-9) of the account's currency. Prices are nano-units per token, so a charge is always a
whole number: 1 nano-unit per token is 0.001 per million tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_app.contracts.messages import set_state
from serve_app.contracts.money import Price
from serve_app.contracts.periods import BudgetPeriod, Period


class Outcome(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # the client hung up, or its stream failed; the usage until then is billed
    FAILED = "failed"  # the service's fault; recorded, not billed


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A complete reply, kept for 24 hours for the account's retries with the same idempotency key."""

    idempotency_key: str
    fingerprint: str  # detects a different request with the same key
    body: bytes = field(repr=False)


RESPONSE_LOST_S = 60.0
"""Seconds of silence after which the gateway that runs a response in the background counts as lost."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that its account can read and continue until it expires."""

    response_id: str
    body: bytes = field(repr=False)  # compressed JSON, see `api/stored_responses.py`
    expires_at: float  # Unix time, seconds
    beat_at: float | None = None  # last heartbeat of the gateway that runs the response; None: the response has ended

    __setstate__ = set_state

    def is_lost(self, now: float) -> bool:
        """Returns whether the response will never end, because its gateway is lost."""
        return self.beat_at is not None and self.beat_at < now - RESPONSE_LOST_S


@dataclass(frozen=True, slots=True)
class RequestUsage:
    request_id: str
    account_id: str
    key_id: str
    model: str  # the identifier in the request
    backend: str  # the application that produced the reply
    price: Price  # the price at admission: with a later, higher price, the charge could exceed the hold
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: Outcome
    started_at: float  # Unix time, seconds
    finished_at: float


@dataclass(frozen=True, slots=True)
class Settlement(RequestUsage):
    """A request to be billed. Settling the same `request_id` again changes nothing and returns the first result."""

    reply: StoredReply | None = None  # stored in the same transaction; the first reply of an idempotency key is kept
    epoch: int = 0  # epoch of the limiter's lease that admitted the request; 0: unknown
    response: StoredResponse | None = None  # stored in the same transaction

    __setstate__ = set_state

    @property
    def cost(self) -> int:
        """Nano-units to charge. It is 0 for a failed request, and for one cancelled before any output."""
        if self.outcome is Outcome.FAILED or (self.outcome is Outcome.CANCELLED and self.completion_tokens == 0):
            return 0
        return self.price.cost(self.prompt_tokens, self.cached_tokens, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Settled:
    request_id: str
    charged: int  # nano-units taken from the balance
    balance: int  # the account's committed balance
    version: int  # account version; higher is newer
    duplicate: bool = False
    # For a key with a budget: nano-units charged to it in the ledger's current period, including this batch.
    key_spent: int | None = None
    key_period: str | None = None
    uncollected: int = 0  # nano-units of the charge that the balance did not cover


@dataclass(frozen=True, slots=True)
class AccountSnapshot:
    """An account as committed."""

    account_id: str
    name: str
    active: bool
    currency: str
    granted: int
    topped_up: int
    version: int
    created_at: float
    limits: Mapping[str, int] = field(default_factory=dict)  # limits set for this account; a missing limit: the default
    #: Remainders of expiring grants: (expires_at in Unix seconds, nano-units left), soonest first.
    expiring: tuple[tuple[float, int], ...] = ()

    @property
    def balance(self) -> int:
        """Nano-units, including recently expired grants, which still pay for requests that began earlier."""
        return self.granted + self.topped_up

    def available(self, now: float) -> int:
        """Returns the nano-units that a request starting at `now` (Unix seconds) can spend."""
        return self.balance - sum(left for expires_at, left in self.expiring if expires_at <= now)


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """An API key as committed; the key itself is never stored, only its digest."""

    key_id: str
    account_id: str
    name: str
    digest: str
    hint: str  # the readable start and end of the key
    active: bool
    version: int
    created_at: float
    revoked_at: float | None = None
    models: tuple[str, ...] | None = None  # None: every model
    limits: Mapping[str, int] = field(default_factory=dict)  # the key's limits; the account's limits apply too
    budget: int | None = None  # nano-units per budget_period
    budget_period: BudgetPeriod | None = None
    spent: int = 0  # nano-units charged to the key in `spent_period`; counted only for keys with a budget
    spent_period: str = ""  # the period at the time of reading, "2026-11-21" or "2026-11"
    spent_version: int = 0  # for keys with a budget: the account version as of which `spent` is valid
    expires_at: float | None = None
    tags: tuple[str, ...] | None = None  # labels by which usage is summed; None: no tags
    addresses: tuple[str, ...] | None = None  # networks from which it may be used, as CIDR; None: any

    __setstate__ = set_state

    @property
    def terms(self) -> dict[str, Any]:
        """The terms that a replacement key inherits, in the form of `CreateKey.terms`: all except the expiry."""
        named = ("models", "tags", "addresses", "budget", "budget_period")
        return {name: getattr(self, name) for name in named} | dict(self.limits)


@dataclass(frozen=True, slots=True)
class GrantSnapshot:
    """Money given to an account, and the amount left of it."""

    grant_id: int  # number of its journal entry
    amount: int  # nano-units
    left: int  # nano-units
    created_at: float
    expires_at: float | None = None  # None: never
    memo: str = ""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Summed usage of one group. Fields that the grouping leaves out are None."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged: int
    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    day: str | None = None  # YYYY-MM-DD in UTC; SumRequests by hour: YYYY-MM-DDTHH
    tag: str | None = None  # empty: keys without a tag

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class RequestSums(UsageRow):
    """Sums over single requests, with fields that daily sums do not have."""

    failed: int = 0  # requests with Outcome.FAILED
    seconds: float = 0.0  # total duration of the requests
    outcome: str | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Movement:
    """Money credited to an account, or debited for a reason other than usage."""

    entry_id: int
    kind: str  # top_up, grant, correction or expiry
    amount: int  # nano-units; negative: a debit
    created_at: float
    memo: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """An account's month: `opening` plus the movements, less the charged usage, is `closing` (nano-units)."""

    month: Period
    opening: int
    movements: tuple[Movement, ...]
    usage: tuple[UsageRow, ...]  # per model
    closing: int


@dataclass(frozen=True, slots=True)
class UsageRecord(RequestUsage):
    """A request as billed."""

    charged: int  # nano-units
    uncollected: int  # nano-units that the balance did not cover
    settled_at: float


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of usage records. `next` is the `after` of the next page, or None on the last page."""

    rows: tuple[UsageRecord, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """The author of a change, for the audit log."""

    actor: str
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    audit_id: int  # consecutive; higher is later
    at: float
    actor: str
    action: str  # the ledger's operation, such as "credit"
    subject: str  # id or name of the changed object: an account, a key, a person, an identifier, …
    account_id: str
    detail: Mapping[str, Any]  # the command's values, or {"was": …, "is": …} for each changed field; JSON values
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    version: int
    accounts: tuple[AccountSnapshot, ...]
    keys: tuple[KeySnapshot, ...]
    more: bool = False  # the limit truncated the answer: continue from `version`


class Refusal(StrEnum):
    """The reason why a settlement was not recorded. A retry fails again unless the cause is removed."""

    ACCOUNT_NOT_FOUND = "account_not_found"
    KEY_NOT_FOUND = "key_not_found"
    REQUEST_OF_ANOTHER_ACCOUNT = "request_of_another_account"
    INVALID = "invalid"
    FAILED = "failed"  # the ledger failed for an unforeseen reason


@dataclass(frozen=True, slots=True)
class SettlementRejected:
    """A settlement that was not recorded. The rest of its batch is not affected.

    With `kept`, the ledger has stored it as a stuck settlement, for an operator.
    """

    request_id: str
    refusal: Refusal
    message: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class StuckSettlement:
    """A settlement that the ledger keeps because it could not settle it."""

    stuck_id: str  # the request's id, escaped and shortened if necessary
    account_id: str
    settlement: Mapping[str, Any]  # as the gateway sent it, without `reply` and `response`
    refusal: Refusal
    reason: str
    first_at: float  # Unix seconds
    last_at: float
    tries: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values that must agree but do not."""

    #: "entry", "balance", "aggregate", "usage", "version", "journal", "grant", "key_spend", "reply", "audit"
    kind: str
    subject: str  # id of the object to inspect
    message: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The numbers of verified rows, and the differences found: at most 100 of each kind per step."""

    accounts: int
    entries: int  # like `usage_rows`, includes rows of earlier checks and of archives
    usage_rows: int
    differences: tuple[Difference, ...]
    next: str | None = None  # `after` for the next steps; None: the check is complete
    done: float = 1.0  # completed share of this check, 0 to 1

    @property
    def ok(self) -> bool:
        """Whether the check is complete and its last steps found no differences."""
        return self.next is None and not self.differences
