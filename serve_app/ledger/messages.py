"""What the ledger is told and what it answers. Plain frozen data: it crosses processes.

Money is integer nano-units (1e-9) of the account's currency; prices are nano-units per token, so that a charge is
always a whole number: 1 nano-unit per token is 0.001 per million tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

BudgetPeriod = Literal["day", "month"]  # calendar days and months, in UTC


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"  # the client went away; what was produced is billed
    FAILED = "failed"  # our fault; recorded, not billed


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-units per token."""

    input: int
    cached_input: int
    output: int

    def charge(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Nano-units for these counts; cached tokens are part of the prompt and have a price of their own."""
        uncached = prompt_tokens - cached_tokens
        return uncached * self.input + cached_tokens * self.cached_input + completion_tokens * self.output


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A complete reply, kept 24 hours for the account's retries under the same idempotency key."""

    idempotency_key: str
    fingerprint: str  # of the request, so that another request under the same key is told apart
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The usage of one request. Settling the same `request_id` again changes nothing and answers the first result."""

    request_id: str
    account_id: str
    key_id: str
    model: str  # the identifier asked for
    backend: str  # the application that answered
    price: Price  # as admitted, so that a price change never bills a request above its hold
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: Outcome
    started_at: float  # Unix time, seconds
    finished_at: float
    reply: StoredReply | None = None  # stored in the same transaction; the first one of an idempotency key stands


@dataclass(frozen=True, slots=True)
class Settled:
    """A settlement that is durable."""

    request_id: str
    charged: int  # nano-units taken from the balance
    balance: int  # the account's committed balance
    version: int  # of the account; higher is newer
    duplicate: bool = False
    # Of a key with a budget, after the whole batch: what is charged to it in the period that the ledger's clock is in.
    key_spent: int | None = None
    key_period: str | None = None


@dataclass(frozen=True, slots=True)
class AccountSnapshot:
    """An account as committed. None limits take the service's defaults."""

    account_id: str
    name: str
    active: bool
    currency: str
    granted: int
    topped_up: int
    version: int
    created_at: float
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    weight: int | None = None  # the share under pressure, beside other accounts' weights
    #: What is left of grants that expire: (expires_at in Unix seconds, nano-units left), soonest first.
    expiring: tuple[tuple[float, int], ...] = ()

    @property
    def balance(self) -> int:
        """Nano-units on the books: also what expired lately and is still payable for requests from before."""
        return self.granted + self.topped_up

    def available(self, now: float) -> int:
        """Nano-units that a request starting at `now` (Unix seconds) can spend."""
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
    rpm: int | None = None  # None: only the account's limits, here and below
    tpm: int | None = None
    concurrency: int | None = None
    budget: int | None = None  # nano-units per budget_period
    budget_period: BudgetPeriod | None = None
    spent: int = 0  # nano-units charged to the key in `spent_period`; only counted for keys with a budget
    spent_period: str = ""  # the period at the time of reading, "2026-11-21" or "2026-11"
    spent_version: int = 0  # with a budget: the account's version in the same snapshot, as in Settled.version
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class GrantSnapshot:
    """Money that was given to an account, and what is left of it."""

    grant_id: int  # the number of its journal entry
    amount: int  # nano-units, as the next
    left: int
    created_at: float
    expires_at: float | None = None  # None: never
    memo: str = ""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Aggregated usage of one group; the fields that the grouping leaves out are None."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged: int
    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    day: str | None = None  # YYYY-MM-DD, UTC


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The usage of one request, as billed."""

    request_id: str
    account_id: str
    key_id: str
    model: str
    backend: str
    price: Price
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged: int  # nano-units
    uncollected: int  # nano-units that the balance did not cover
    outcome: Outcome
    started_at: float
    finished_at: float
    settled_at: float


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of usage records; `next` asks for the page behind it, None: there is none."""

    rows: tuple[UsageRecord, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """Who asks for a change: goes into the audit log with it."""

    actor: str
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A change that an operator has made."""

    audit_id: int  # without gaps; higher is later
    at: float
    actor: str
    action: str  # the ledger's operation, such as "credit"
    subject: str  # the id of the account or key that was changed
    account_id: str
    detail: Mapping[str, Any]  # what was asked for, or {"was": …, "is": …} of each field that changed; JSON values
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Accounts and keys that changed after a version."""

    version: int
    accounts: tuple[AccountSnapshot, ...]
    keys: tuple[KeySnapshot, ...]
    more: bool = False  # the limit cut the answer: ask again from `version`


class Refusal(StrEnum):
    """Why a settlement can never be settled as it is."""

    ACCOUNT_NOT_FOUND = "account_not_found"
    KEY_NOT_FOUND = "key_not_found"
    REQUEST_OF_ANOTHER_ACCOUNT = "request_of_another_account"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class SettlementRejected:
    """A settlement that was not recorded; repeating it changes nothing. The rest of its batch is not affected."""

    request_id: str
    refusal: Refusal
    message: str
