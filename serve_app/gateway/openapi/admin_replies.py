"""What `/admin` answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serve_app.gateway.openapi.account_replies import Amount, Count, UsageSums

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, description="In UTC.")]
PerMillion = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]{2,3}$", description="Per million tokens.")]


class Limits(BaseModel):
    """Requests and tokens a minute, and requests at once."""

    rpm: int
    tpm: int
    concurrency: int


class OwnLimits(BaseModel):
    """Limits of one's own; null where there is none."""

    rpm: int | None
    tpm: int | None
    concurrency: int | None


class Contract(OwnLimits):
    """An account's own limits and weight; null is the service's default."""

    weight: int | None


class Pressed(BaseModel):
    """A backend under pressure and what it leaves."""

    backend: str
    tpm: int


class Expiring(BaseModel):
    """A grant that will expire, and what is left of it."""

    expires_at: Time
    left: Amount


class AccountUsage(BaseModel):
    """All that the account ever used."""

    account_id: str | None = None
    requests: Count
    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    charged: Amount


class Account(BaseModel):
    """An account."""

    id: str
    name: str
    status: Literal["active", "suspended"]
    currency: str
    balance: Amount = Field(description="On the books.")
    available: Amount = Field(description="Without grants that have expired.")
    granted: Amount
    topped_up: Amount
    expiring: list[Expiring]
    held: Amount = Field(description="Set aside for requests that run.")
    open_requests: Count
    weight: int = Field(description="The share under pressure, beside other accounts' weights.")
    limits: Limits
    effective: Limits = Field(description="What pressure leaves of the limits.")
    pressure: list[Pressed]
    contract: Contract
    usage: AccountUsage
    created_at: Time


class AccountPage(BaseModel):
    """A page of accounts."""

    data: list[Account]
    next: str | None = Field(description="`after` of the next page; null: there is none.")


class Key(BaseModel):
    """An API key, without the key itself, which is not stored. null: no bound of its own."""

    id: str
    account_id: str
    name: str
    hint: str = Field(description="Its readable start and end.")
    status: Literal["active", "revoked", "expired"]
    models: list[str] | None
    limits: OwnLimits
    budget: Amount | None
    budget_period: Literal["day", "month"] | None
    spent: Amount | None = Field(description="In this period; null without a budget.")
    renews_at: Time | None
    expires_at: Time | None
    created_at: Time
    revoked_at: Time | None


class NewKey(Key):
    """A key that was just made."""

    key: str = Field(description="The key itself, shown this once.")


class KeyList(BaseModel):
    """All keys of an account, revoked ones too."""

    data: list[Key]


class Grant(BaseModel):
    """Money that was given."""

    id: int
    status: Literal["open", "spent", "expired"]
    amount: Amount
    left: Amount
    created_at: Time
    expires_at: Time | None
    memo: str


class GrantList(BaseModel):
    """All that an account was given."""

    data: list[Grant]


class AdminUsageSums(UsageSums):
    """Sums of one group; what it is not grouped by is null."""


class AdminUsage(BaseModel):
    """Usage by group."""

    data: list[AdminUsageSums]


class RequestRecord(BaseModel):
    """A request as billed."""

    request_id: str
    account_id: str
    key_id: str
    model: str
    backend: str
    outcome: Literal["completed", "cancelled", "failed"]
    started_at: Time
    finished_at: Time
    settled_at: Time
    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    price_input: PerMillion
    price_cached_input: PerMillion
    price_output: PerMillion
    charged: Amount
    uncollected: Amount = Field(description="What the balance did not cover.")


class RequestPage(BaseModel):
    """A page of requests."""

    data: list[RequestRecord]
    next: str | None = Field(description="`after` of the next page; null: there is none.")


class AuditEntry(BaseModel):
    """What an operator did."""

    id: int
    at: Time
    actor: str
    action: str
    subject: str
    account_id: str
    request_id: str | None
    address: str | None
    detail: dict[str, Any] = Field(description="What was asked for, or `was` and `is` of what changed.")


class AuditPage(BaseModel):
    """A page of the audit log, newest first."""

    data: list[AuditEntry]
    next: int | None = Field(description="`after` of the next page; null: there is none.")


class Problem(BaseModel):
    """Something in the books that does not add up."""

    kind: str
    subject: str
    message: str


class LedgerCheck(BaseModel):
    """Whether balances, sums and usage agree with the journal."""

    ok: bool
    accounts: Count
    entries: Count
    usage_rows: Count
    problems: list[Problem]


class AdminBackend(BaseModel):
    """A backend behind an identifier."""

    name: str
    weight: Count
    status: str
    replicas: Count


class AdminPrice(BaseModel):
    """Prices per million tokens, as configured."""

    input: str
    cached_input: str
    output: str


class AdminModel(BaseModel):
    """An identifier, what stands behind it and what it costs."""

    id: str
    backends: list[AdminBackend]
    price: AdminPrice


class AdminModelList(BaseModel):
    """All identifiers."""

    data: list[AdminModel]
