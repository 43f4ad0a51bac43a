"""What the limiter is asked and what it answers. Plain frozen data: it crosses processes.

Money is integer nano-units of the account's currency, prices are nano-units per token, times are seconds; a point in
time that crosses processes is Unix time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BudgetPeriod = Literal["day", "month"]  # of UTC


@dataclass(frozen=True, slots=True)
class Contract:
    """Upper limits of an account: requests and tokens per minute, requests at once; and its share under pressure."""

    rpm: int
    tpm: int
    concurrency: int
    weight: int = 100


@dataclass(frozen=True, slots=True)
class AccountState:
    """An account as the ledger committed it. A higher `version` is newer. None takes the default contract's value."""

    account_id: str
    active: bool
    balance: int  # nano-units, granted and topped up together
    version: int
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    weight: int | None = None
    # Grants in `balance` that expire and have something left: (expires at, nano-units left), soonest first.
    expiring: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KeyState:
    """An API key as the ledger committed it. Revoked keys stay known, so that they are refused without a look-up.

    None where the key has no such limit of its own: the account's always apply, too. `spent` is what was charged to
    the key in `spent_period` ("2026-11-21" or "2026-11"), as of the account's version `spent_version`; it is kept for
    keys with a budget.
    """

    digest: str
    key_id: str
    account_id: str
    active: bool
    version: int
    models: tuple[str, ...] | None = None  # that it may ask for; None: all
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget: int | None = None  # nano-units in each period
    budget_period: BudgetPeriod | None = None
    spent: int = 0
    spent_period: str = ""
    spent_version: int = 0
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """Asks for one request to be let in.

    `prompt_tokens` is an estimate; `max_tokens` is the output asked for. `holder` names the gateway process whose
    lease the hold lives under. Of the requests of an account that carry the same `idempotency_key`, one is open at a
    time; the others get 409.
    """

    request_id: str
    holder: str
    key_digest: str
    model: str
    prompt_tokens: int
    max_tokens: int
    prompt_price: int
    output_price: int
    backend: str = ""  # the application that will run it
    idempotency_key: str | None = None
    look_up: bool = True  # False: a key that is not known yet is answered by UnknownKey, without asking the ledger


@dataclass(frozen=True, slots=True)
class Adjust:
    """Replaces the estimate of an admitted request by the tokenizer's exact count, before any output exists."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """One rate limit as the `x-ratelimit-*` headers show it: the tighter one of account and key."""

    limit: int
    remaining: int
    reset_s: float  # until the bucket is full again


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may run: `hold` nano-units are set aside, which pay for the prompt and `max_tokens` of output."""

    request_id: str
    account_id: str
    key_id: str
    hold: int
    max_tokens: int
    requests: Window
    tokens: Window
    tokens_charged: int = 0  # what the token bucket was charged at admission
    # The estimated prompt and one token cost more than the free balance: `hold` is all of it and does not pay for
    # `max_tokens`. Nothing may be generated that the hold does not pay for, before `Adjust` has been granted.
    tentative: bool = False
    weight: int = 100  # of the account, for the model's queue


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """The limiter does not know this key or its account: look them up in the ledger, apply them and ask again."""

    request_id: str
    key_digest: str


@dataclass(frozen=True, slots=True)
class Recovering:
    """Ask again: the limiter does not know enough yet. It has just started (announce your holds), or clocks differ."""

    request_id: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request may not run and has consumed nothing."""

    request_id: str
    status: int  # 401, 402, 409, 422, 429 or 503
    # invalid_api_key; model_not_found; idempotency_in_progress; insufficient_balance, budget_exceeded; requests,
    # tokens, concurrency; overloaded
    code: str
    message: str  # says what to change
    retry_after_s: float | None = None  # with 409, 429 and 503, at most 60
    requests: Window | None = None
    tokens: Window | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a request: frees its hold and concurrency slot and corrects the token bucket to what was used.

    `balance` and `version` are the account's committed ones after settlement; None when nothing was settled. With
    `refused` the request was refused after admission (too long for the context, queue full): everything that admission
    consumed is given back, the request rate too. A request whose settlement is still waiting to be committed must not
    be released yet: its hold is all that protects its charge.

    `key_spent` is what was charged to the key in `key_period`, as of `version`; None for keys without a budget.
    """

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    balance: int | None = None
    version: int | None = None
    refused: bool = False
    # Let the balance and what the key has spent be taken over although the hold is gone (expired, or a restart).
    account_id: str | None = None
    key_id: str | None = None
    key_spent: int | None = None
    key_period: str | None = None


@dataclass(frozen=True, slots=True)
class OpenHold:
    """A hold as its gateway knows it, announced again to a limiter that has restarted."""

    request_id: str
    account_id: str
    key_id: str
    hold: int
    tokens_charged: int  # what the token bucket was charged at admission
    prompt_price: int
    output_price: int
    max_tokens: int
    backend: str = ""
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Renew:
    """A gateway's heartbeat: these holds are alive. A holder that stops renewing loses its holds.

    Answered by the requests that are not open here, or by ShardsDiffer.
    """

    holder: str
    request_ids: tuple[str, ...]
    shards: int = 1  # limiter shards that the gateway counts
    open_requests: int = 0  # of the gateway, in all shards


@dataclass(frozen=True, slots=True)
class ShardsDiffer:
    """The gateway may let nothing in: it, or another one with open requests, does not count the shards that there are.

    `other` is what that one counts.
    """

    shards: int
    other: int


@dataclass(frozen=True, slots=True)
class Identify:
    """Asks whose key this is, without admitting anything. Answered by Identity or a Refusal with 401."""

    key_digest: str
    look_up: bool = True  # as with Admit


@dataclass(frozen=True, slots=True)
class Identity:
    """An active key of an active account."""

    account_id: str
    key_id: str


@dataclass(frozen=True, slots=True)
class Status:
    """Asks for what the limiter knows of these accounts. Answered by a tuple of AccountStatus, in order."""

    account_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AccountStatus:
    """Open holds in nano-units, open requests, the limits, and what pressure leaves of them."""

    account_id: str
    held: int
    open_requests: int
    contract: Contract
    pressed: tuple[tuple[str, int], ...] = ()  # backends under pressure, and the tokens per minute left there


@dataclass(frozen=True, slots=True)
class Announce:
    """A gateway's open holds, told to a limiter that does not know them. Answered by True."""

    holder: str
    holds: tuple[OpenHold, ...]


@dataclass(frozen=True, slots=True)
class PressureReport:
    """What one replica of a backend has to do, told to each shard about twice a second.

    Answered with the number of limiter shards, so that a replica learns whom to tell.
    """

    backend: str
    replica: str  # a new name after each restart
    queue_age_s: float  # since the oldest request that waits came; 0 when none waits
    kv_used: float  # share of the KV cache that cannot be taken back, 0 to 1
    queued_prefill_tokens: int
    waiting: int  # requests
    running: int
    # Tokens of prompts that began and of output, since the replica started; 0: not told. Its rise is the rate of work.
    tokens_done: int = 0
