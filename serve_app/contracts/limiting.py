"""The limiter's asks and answers. Plain frozen data: it crosses processes.

Money is integer nano-units of the account's currency, prices are nano-units per token, times are seconds; a point in
time that crosses processes is Unix time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve_app.contracts.limits import Contract
from serve_app.contracts.messages import set_state

MAX_RETRY_AFTER_S: Final = 60.0  # client libraries do not wait much longer
HEARTBEAT_S: Final = 0.5  # between a gateway's renewals of its holds
# A gateway uses no grant that arrives later after its ask was sent: the limiter may have had a successor since.
GRANT_TRUST_S: Final = 2.0
# How long a limiter that took over waits for the holds that were granted before: a last grant, then two heartbeats.
RECOVERY_S: Final = GRANT_TRUST_S + 2 * HEARTBEAT_S


def owner_of(holder: str, shard: int) -> str:
    """The owner of holds of this gateway and limiter shard that are posted in the ledger."""
    return f"{holder}/{shard}"


@dataclass(frozen=True, slots=True)
class Admit:
    """Asks for one request to be admitted. Returns Grant, Refusal, UnknownKey or Recovering.

    `prompt_tokens` is an estimate; `max_tokens` is the output asked for. `holder` names the gateway process under
    whose lease the hold lives. Of an account's requests with the same `idempotency_key`, one is open at a time; the
    others get 409.
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
    look_up: bool = True  # False: UnknownKey for a key that is not known yet, without asking the ledger
    address: str = ""  # that the request comes from, not parsed yet; a key with allowed addresses needs it

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Adjust:
    """Replaces the estimate of an admitted request by the tokenizer's exact count, before any output exists.

    Returns Grant, Refusal or Recovering.
    """

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The rate limits of one unit as the `x-ratelimit-*` headers show them: the tightest, of account and key."""

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
    epoch: int = 0  # of the limiter's lease; 0: it needs none
    from_anywhere: bool = True  # False: the key has allowed addresses, and each request must be asked about

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """The limiter does not know this key or its account."""

    request_id: str
    key_digest: str


@dataclass(frozen=True, slots=True)
class Recovering:
    """Ask again: the limiter does not know enough yet. It has just started (announce the holds), or clocks differ."""

    request_id: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request may not run and has consumed nothing."""

    request_id: str
    status: int  # 401, 402, 403, 409, 422, 429 or 503
    # invalid_api_key; address_not_allowed; model_not_found; idempotency_in_progress; insufficient_balance,
    # budget_exceeded; requests, tokens, concurrency; overloaded
    code: str
    message: str  # says what to change
    retry_after_s: float | None = None  # with 409, 429 and 503, at most 60
    requests: Window | None = None
    tokens: Window | None = None
    # Of a key that is known: for logs.
    account_id: str = ""
    key_id: str = ""
    from_anywhere: bool = True  # as in Grant

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a request: frees its hold and concurrency slot and corrects the token buckets to what was used.

    `balance` and `version` are the account's committed ones after settlement; None when nothing was settled. With
    `refused` the request was refused after admission (too long for the context, queue full): everything that admission
    consumed is given back, the request rate too, unless it `keeps_rate`: then the request and `prompt_tokens` stay
    counted. A request whose settlement is not committed yet must not be released:
    only its hold protects its charge.

    `key_spent` is what was charged to the key in `key_period`, as of `version`; None for keys without a budget.
    """

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    balance: int | None = None
    version: int | None = None
    refused: bool = False
    keeps_rate: bool = False  # with `refused`
    # With these, balance and `key_spent` are taken over even if the hold is gone (expired, or a restart).
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
class SpoolState:
    """What a gateway has in its spool, spools that it took over included."""

    settlements: int
    bytes: int
    age_s: float  # since the end of the request that waits longest; 0 when none waits
    ledger_away: bool  # settlements go to the spool at once


@dataclass(frozen=True, slots=True)
class Renew:
    """A gateway's heartbeat: these holds are alive. A holder that stops renewing loses its holds.

    Returns Renewed or ShardsDiffer.
    """

    holder: str
    request_ids: tuple[str, ...]
    shards: int = 1  # limiter shards that the gateway is configured with
    open_requests: int = 0  # of the gateway, in all shards
    spool: SpoolState | None = None  # None: not measured yet

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Renewed:
    """The requests that are not open here, and the epoch under which this limiter admits; None: it does not admit."""

    unknown: tuple[str, ...]
    epoch: int | None = 0


@dataclass(frozen=True, slots=True)
class ShardsDiffer:
    """The gateway must admit nothing: it, or another one with open requests, has another number of shards (`other`)."""

    shards: int
    other: int


@dataclass(frozen=True, slots=True)
class Identify:
    """Asks whose key this is, without admitting anything. Returns Identity, a Refusal with 401 or 403, or as Admit."""

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

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Status:
    """Asks what is known of these accounts. Returns a tuple of AccountStatus, in order."""

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
    """A gateway's open holds, for a limiter that does not know them. Returns True."""

    holder: str
    holds: tuple[OpenHold, ...]


@dataclass(frozen=True, slots=True)
class PressureReport:
    """What one replica of a backend has to do, sent to each shard about twice a second. Returns Heard."""

    backend: str
    replica: str  # a new name after each restart
    queue_age_s: float  # since the oldest request that waits came; 0 when none waits
    kv_used: float  # share of the KV cache that cannot be taken back, 0 to 1
    queued_prefill_tokens: int
    waiting: int  # requests
    running: int
    # Tokens of prompts that began and of output, since the replica started; 0: unknown. Its rise is the rate of work.
    tokens_done: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """What a replica learns from a report: where to send its reports, and what the backend's accounts did not get."""

    shards: int  # limiter shards, each of which wants the reports
    refused_tokens_per_s: float  # of this shard's accounts; each request counts once, however often it is tried


@dataclass(frozen=True, slots=True)
class Live:
    """Asks what goes on now. Each shard returns a LiveReport of its own accounts, with `top` of them at most."""

    top: int


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """What the replicas of a backend had to do by their last reports, and what that leaves accounts."""

    backend: str
    replicas: int  # that report
    running: int
    waiting: int
    queue_age_s: float  # the lower median of the replicas
    kv_used: float  # the mean of the replicas, 0 to 1
    queued_prefill_tokens: int
    tokens_per_s: float  # the work of the last seconds: prompts that began and output
    pressure: float  # queueing delay over its target
    effective_share: float  # what is left of the default contract's tokens per minute, 0 to 1


@dataclass(frozen=True, slots=True)
class BusyAccount:
    """An account with open requests."""

    account_id: str
    name: str  # empty while only its holds are known
    open_requests: int
    held: int  # nano-units
    tokens: Window  # of its tightest limit on tokens
    effective_share: float  # of its contract, on the backend that leaves it least of those that it uses; 0 to 1


@dataclass(frozen=True, slots=True)
class LiveGateway:
    """A gateway by its last heartbeat."""

    holder: str
    open_requests: int
    spool: SpoolState | None


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What one limiter shard sees. Replicas and gateways report to every shard: `backends` and `gateways` are alike."""

    admits: bool
    open_requests: int
    held: int  # nano-units
    backends: tuple[BackendLoad, ...]
    accounts: tuple[BusyAccount, ...]  # those with the most open requests, then with the most held, first
    gateways: tuple[LiveGateway, ...] = ()

    __setstate__ = set_state


Ask = Admit | Adjust | Release | Renew | Announce | Identify | Status | Live | PressureReport
