"""What the ledger receives and returns: frozen data that crosses processes.

Money is integer nano-units (1e-9) of the account's currency; prices are nano-units per token, so that a charge is
always a whole number: 1 nano-unit per token is 0.001 per million tokens.
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
    CANCELLED = "cancelled"  # the client went away; what was produced is billed
    FAILED = "failed"  # our fault; recorded, not billed


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A complete reply, kept 24 hours for the account's retries under the same idempotency key."""

    idempotency_key: str
    fingerprint: str  # of the request, so that another request under the same key is recognised
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one request used."""

    request_id: str
    account_id: str
    key_id: str
    model: str  # the identifier in the request
    backend: str  # the application that produced the reply
    price: Price  # as admitted, so that a price change never bills a request above its hold
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: Outcome
    started_at: float  # Unix time, seconds
    finished_at: float


@dataclass(frozen=True, slots=True)
class Settlement(RequestUsage):
    """A request to be billed. Settling the same `request_id` again changes nothing and returns the first result."""

    reply: StoredReply | None = None  # stored in the same transaction; the first one of an idempotency key stands
    epoch: int = 0  # of the limiter's lease under which it was admitted; 0: unknown

    @property
    def cost(self) -> int:
        """Nano-units: nothing for a request that failed, or was cancelled before it produced anything."""
        if self.outcome is Outcome.FAILED or (self.outcome is Outcome.CANCELLED and self.completion_tokens == 0):
            return 0
        return self.price.cost(self.prompt_tokens, self.cached_tokens, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Settled:
    request_id: str
    charged: int  # nano-units taken from the balance
    balance: int  # the account's committed balance
    version: int  # of the account; higher is newer
    duplicate: bool = False
    # Of a key with a budget, after the whole batch: what is charged to it in the current period of the ledger's clock.
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
    limits: Mapping[str, int] = field(default_factory=dict)  # its own (contracts.limits); defaults hold for the rest
    #: What is left of grants that expire: (expires_at in Unix seconds, nano-units left), soonest first.
    expiring: tuple[tuple[float, int], ...] = ()

    @property
    def balance(self) -> int:
        """Nano-units on the books: also what expired lately and still pays for requests that began before."""
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
    limits: Mapping[str, int] = field(default_factory=dict)  # its own; the account's hold too
    budget: int | None = None  # nano-units per budget_period
    budget_period: BudgetPeriod | None = None
    spent: int = 0  # nano-units charged to the key in `spent_period`; only counted for keys with a budget
    spent_period: str = ""  # the period at the time of reading, "2026-11-21" or "2026-11"
    spent_version: int = 0  # with a budget: the account's version in the same snapshot, as in Settled.version
    expires_at: float | None = None
    tags: tuple[str, ...] | None = None  # by which its usage is summed; None: none
    addresses: tuple[str, ...] | None = None  # the networks that it may be used from, as CIDR; None: anywhere

    __setstate__ = set_state

    @property
    def terms(self) -> dict[str, Any]:
        """What a key that replaces it has too, as CreateKey takes it: all of its terms but the expiry."""
        named = ("models", "tags", "addresses", "budget", "budget_period")
        return {name: getattr(self, name) for name in named} | dict(self.limits)


@dataclass(frozen=True, slots=True)
class GrantSnapshot:
    """Money given to an account, and what is left of it."""

    grant_id: int  # the number of its journal entry
    amount: int  # nano-units
    left: int  # nano-units
    created_at: float
    expires_at: float | None = None  # None: never
    memo: str = ""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The summed usage of one group; fields that the grouping leaves out are None."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged: int
    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    day: str | None = None  # YYYY-MM-DD, UTC; of SumHours with the hour behind it, YYYY-MM-DDTHH
    tag: str | None = None  # empty: of keys without a tag

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Movement:
    """Money that came to an account, or left it other than for usage."""

    entry_id: int
    kind: str  # top_up, grant, correction or expiry
    amount: int  # nano-units; negative: it left
    created_at: float
    memo: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """An account's month: `opening` and the movements, less what the usage was charged, are `closing` (nano-units)."""

    month: Period
    opening: int
    movements: tuple[Movement, ...]
    usage: tuple[UsageRow, ...]  # by model
    closing: int


@dataclass(frozen=True, slots=True)
class UsageRecord(RequestUsage):
    """A request as billed."""

    charged: int  # nano-units
    uncollected: int  # nano-units that the balance did not cover
    settled_at: float


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of usage records. `next` is the `after` of the next page; None: this is the last one."""

    rows: tuple[UsageRecord, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """Who asks for a change; it goes into the audit log."""

    actor: str
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    audit_id: int  # without gaps; higher is later
    at: float
    actor: str
    action: str  # the ledger's operation, such as "credit"
    subject: str  # the id of the account or key that was changed
    account_id: str
    detail: Mapping[str, Any]  # the command's values, or {"was": …, "is": …} of each field that changed; JSON values
    request_id: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    version: int
    accounts: tuple[AccountSnapshot, ...]
    keys: tuple[KeySnapshot, ...]
    more: bool = False  # the limit cut the answer: read on from `version`


class Refusal(StrEnum):
    """Why a settlement was not recorded. Unless something changes, it never will be."""

    ACCOUNT_NOT_FOUND = "account_not_found"
    KEY_NOT_FOUND = "key_not_found"
    REQUEST_OF_ANOTHER_ACCOUNT = "request_of_another_account"
    OTHER_CURRENCY = "other_currency"  # the account's is not the ledger's, in which prices are
    INVALID = "invalid"
    FAILED = "failed"  # the ledger failed on it, for a reason that nothing foresaw


@dataclass(frozen=True, slots=True)
class SettlementRejected:
    """A settlement that was not recorded; repeating it changes nothing. The rest of its batch is not affected.

    `kept`: the ledger keeps it among the stuck settlements, where an operator finds it.
    """

    request_id: str
    refusal: Refusal
    message: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class StuckSettlement:
    """A settlement that the ledger keeps because it could not settle it."""

    stuck_id: str  # its request's id, or what can be shown of it
    account_id: str
    settlement: Mapping[str, Any]  # as it was sent, without the reply
    refusal: Refusal
    reason: str
    first_at: float  # Unix seconds
    last_at: float
    tries: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two things that should agree and do not."""

    #: "entry", "balance", "aggregate", "usage", "version", "journal", "grant", "key_spend", "reply", "audit"
    kind: str
    subject: str  # the id of what to look at
    message: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How many rows were proven, and what did not agree: at most 100 differences of a kind in one step."""

    accounts: int
    entries: int  # also those of earlier checks and of archives, as the next
    usage_rows: int
    differences: tuple[Difference, ...]
    next: str | None = None  # `after` of the next steps; None: the check is complete
    done: float = 1.0  # the part of this check that is done, 0 to 1

    @property
    def ok(self) -> bool:
        """Whether the check is complete, and everything that its last steps compared agrees."""
        return self.next is None and not self.differences
