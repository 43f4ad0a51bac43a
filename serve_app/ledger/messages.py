"""What the ledger is told and what it answers. Plain frozen data: it crosses processes.

Money is integer nano-units (1e-9) of the account's currency; prices are nano-units per token, so that a charge is
always a whole number: 1 nano-unit per token is 0.001 per million tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class Settled:
    """A settlement that is durable."""

    request_id: str
    charged: int  # nano-units taken from the balance
    balance: int  # the account's committed balance
    version: int  # of the account; higher is newer
    duplicate: bool = False


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

    @property
    def balance(self) -> int:
        """Nano-units that can be spent."""
        return self.granted + self.topped_up


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
