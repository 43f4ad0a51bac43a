"""Requests to the limiter and its answers, as plain frozen data that crosses processes.

Money is integer nano-units of the account's currency, prices are nano-units per token, and times are seconds. A point
in time that crosses processes is Unix time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve_app.contracts.limits import Contract
from serve_app.contracts.messages import set_state

MAX_RETRY_AFTER_S: Final = 60.0  # client libraries do not wait much longer
HEARTBEAT_S: Final = 0.5  # between a gateway's renewals of its holds
# Seconds after sending an ask within which the gateway accepts a grant. Later, a new limiter may have taken over.
GRANT_TRUST_S: Final = 2.0
# Seconds for which a new limiter admits nothing: earlier grants still arrive, and two heartbeats announce all holds.
RECOVERY_S: Final = GRANT_TRUST_S + 2 * HEARTBEAT_S


def owner_of(holder: str, shard: int) -> str:
    """Returns the name under which the ledger stores the holds that the gateway `holder` posts for a limiter shard."""
    return f"{holder}/{shard}"


@dataclass(frozen=True, slots=True)
class Admit:
    """Asks to admit one request. Returns Grant, Refusal, UnknownKey or Recovering.

    `prompt_tokens` is an estimate; `max_tokens` is the requested output. `holder` names the gateway process whose
    heartbeats keep the hold open. Only one of an account's requests with the same `idempotency_key` is open at a time;
    the others get 409.
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
    look_up: bool = True  # False: returns UnknownKey for a key that is not known yet, instead of querying the ledger
    address: str = ""  # the client's address, not parsed yet; required for a key with allowed addresses

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Adjust:
    """Replaces the estimate of an admitted request with the tokenizer's exact count, before any output exists.

    Returns Grant, Refusal or Recovering. `key_digest` is that of the Admit: a limiter that has restarted needs it to
    look up the key and its account.
    """

    request_id: str
    prompt_tokens: int
    key_digest: str = ""  # empty: sent by an earlier release

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Window:
    """State of a rate limit, as in the `x-ratelimit-*` headers. If several limits apply, it is that of the tightest."""

    limit: int
    remaining: int
    reset_s: float  # time until the bucket is full again


@dataclass(frozen=True, slots=True)
class Grant:
    """Admits the request. `hold` nano-units are reserved and pay for the prompt and `max_tokens` of output."""

    request_id: str
    account_id: str
    key_id: str
    hold: int
    max_tokens: int
    requests: Window
    tokens: Window
    tokens_charged: int = 0  # tokens charged to the token bucket at admission
    # True: the estimated prompt and one token cost more than the free balance. `hold` is the whole free balance and
    # does not pay for `max_tokens`. Before `Adjust` is granted, the gateway may generate only what the hold pays for.
    tentative: bool = False
    weight: int = 100  # the account's weight in the model's queue
    epoch: int = 0  # epoch of the limiter's lease; 0: no lease is needed
    from_anywhere: bool = True  # False: the key has allowed addresses, so each request's address must be checked

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """The limiter does not know this key or its account."""

    request_id: str
    key_digest: str


@dataclass(frozen=True, slots=True)
class Recovering:
    """Try again: the limiter cannot decide yet. For example, it has just started, has no lease, or clocks differ."""

    request_id: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request may not run and has consumed nothing."""

    request_id: str
    status: int  # 401, 402, 403, 409, 422, 429 or 503
    # 401 invalid_api_key; 402 insufficient_balance, budget_exceeded; 403 address_not_allowed;
    # 409 idempotency_in_progress; 422 model_not_found; 429 requests, tokens, concurrency; 503 overloaded
    code: str
    message: str  # states what to change
    retry_after_s: float | None = None  # with 409, 429 and 503, at most 60
    requests: Window | None = None
    tokens: Window | None = None
    # For logs; set if the key is known.
    account_id: str = ""
    key_id: str = ""
    from_anywhere: bool = True  # as in Grant

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a request: frees its hold and concurrency slot, and corrects the token buckets to the actual usage.

    `balance` and `version` are the account's committed values after settlement, or None if nothing was settled. With
    `refused`, the request was refused after admission (too long for the context, queue full). Everything that admission
    consumed is then returned, including the request rate. With `keeps_rate`, the request and its `prompt_tokens` still
    count against the rates. Do not release a request whose settlement is not committed yet: only its hold protects its
    charge.

    `key_spent` is the amount charged to the key in `key_period`, as of `version`; None for keys without a budget.
    """

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    balance: int | None = None
    version: int | None = None
    refused: bool = False
    keeps_rate: bool = False  # only with `refused`
    # With these, `balance` and `key_spent` are applied even if the hold is gone (expired, or after a restart).
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
    tokens_charged: int  # tokens charged to the token bucket at admission
    prompt_price: int
    output_price: int
    max_tokens: int
    backend: str = ""
    idempotency_key: str | None = None
    opened_at: float = 0.0  # Unix time, not before the settlement's `started_at`; 0: sent by an earlier release

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class SpoolState:
    """Contents of a gateway's spool, including the spools that it adopted."""

    settlements: int
    bytes: int
    age_s: float  # seconds since the end of the request whose settlement has waited longest; 0: none waits
    ledger_away: bool  # the ledger is unavailable: settlements go to the spool at once


@dataclass(frozen=True, slots=True)
class Renew:
    """A gateway's heartbeat: these holds are alive. A holder that stops renewing loses its holds.

    Returns Renewed or ShardsDiffer.
    """

    holder: str
    request_ids: tuple[str, ...]
    shards: int = 1  # limiter shards in the gateway's configuration
    open_requests: int = 0  # the gateway's open requests, in all shards
    spool: SpoolState | None = None  # None: not measured yet

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to Renew. The gateway must announce the `unknown` requests again.

    `epoch` is None if the limiter admits no requests.
    """

    unknown: tuple[str, ...]
    epoch: int | None = 0


@dataclass(frozen=True, slots=True)
class ShardsDiffer:
    """The gateway must admit nothing: it, or another gateway with open requests, has `other` shards, not `shards`."""

    shards: int
    other: int


@dataclass(frozen=True, slots=True)
class Identify:
    """Asks for the account of a key, without admitting a request.

    Returns Identity, a Refusal with 401 or 403, or UnknownKey or Recovering as for Admit.
    """

    key_digest: str
    look_up: bool = True  # as with Admit
    address: str = ""  # as with Admit

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Identity:
    """An active key of an active account."""

    account_id: str
    key_id: str
    from_anywhere: bool = True  # as in Grant
    models: tuple[str, ...] | None = None  # the identifiers that the key may use; None: all

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Status:
    """Asks for the state of these accounts. Returns a tuple of AccountStatus, in order."""

    account_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AccountStatus:
    """Open holds in nano-units, open requests, the limits, and the lower token limits on backends under pressure."""

    account_id: str
    held: int
    open_requests: int
    contract: Contract
    pressed: tuple[tuple[str, int], ...] = ()  # (backend under pressure, the account's tokens per minute on it)


@dataclass(frozen=True, slots=True)
class Announce:
    """A gateway's open holds, sent to a limiter that does not know them. Returns True."""

    holder: str
    holds: tuple[OpenHold, ...]


@dataclass(frozen=True, slots=True)
class PressureReport:
    """Load of one replica of a backend, sent to each shard about twice a second. Returns Heard."""

    backend: str
    replica: str  # a new name after each restart
    queue_age_s: float  # age of the oldest waiting request; 0: none waits
    kv_used: float  # share of the KV cache that cannot be reclaimed, 0 to 1
    queued_prefill_tokens: int
    waiting: int  # requests
    running: int
    # Tokens of begun prompts and of output since the replica started; 0: unknown. Limiters derive a rate from it.
    tokens_done: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """Answer to a report: the number of shards to report to, and the demand that this shard refused for the backend."""

    shards: int  # limiter shards; each of them expects the reports
    refused_tokens_per_s: float  # demand of this shard's accounts; a request and its retries count once


@dataclass(frozen=True, slots=True)
class Live:
    """Asks for the current state. Each shard returns a LiveReport of its accounts, with at most `top` of them."""

    top: int


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """Load of a backend from its replicas' last reports, and the share of their limits that accounts may still use."""

    backend: str
    replicas: int  # replicas that report
    running: int
    waiting: int
    queue_age_s: float  # lower median of the replicas
    kv_used: float  # mean of the replicas, 0 to 1
    queued_prefill_tokens: int
    tokens_per_s: float  # tokens of begun prompts and of output per second, in the last seconds
    # The larger of two ratios: queueing delay to its target, and work in queued prompts to its target.
    pressure: float
    effective_share: float  # share of the default contract's tokens per minute that may be used now, 0 to 1


@dataclass(frozen=True, slots=True)
class BusyAccount:
    """An account with open requests."""

    account_id: str
    name: str  # empty while the limiter knows only the account's holds
    open_requests: int
    held: int  # nano-units
    tokens: Window  # its tightest token limit
    effective_share: float  # share of its contract that it may use now on its most limited backend, 0 to 1


@dataclass(frozen=True, slots=True)
class LiveGateway:
    """State of a gateway at its last heartbeat."""

    holder: str
    open_requests: int
    spool: SpoolState | None


@dataclass(frozen=True, slots=True)
class LiveReport:
    """State of one limiter shard. `backends` and `gateways` are the same in all shards: they report to each of them."""

    admits: bool
    open_requests: int
    held: int  # nano-units
    backends: tuple[BackendLoad, ...]
    accounts: tuple[BusyAccount, ...]  # ordered by open requests, then by held amount, largest first
    gateways: tuple[LiveGateway, ...] = ()

    __setstate__ = set_state


Ask = Admit | Adjust | Release | Renew | Announce | Identify | Status | Live | PressureReport
