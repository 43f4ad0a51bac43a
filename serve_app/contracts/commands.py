"""Operations on the ledger, one command each. `AccountingPort.run` returns the command's answer.

Amounts are nano-units, times are Unix seconds. Each command names the errors of `contracts.errors` that it raises
besides LedgerUnavailable. A write that raises LedgerUnavailable may have happened: repeat it unchanged. Its idempotency
key, or the value that it sets, makes the repetition harmless. With an `audit`, a change is recorded in the audit log. A
command that changes nothing is not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from serve_app.contracts.books import (
    AccountSnapshot,
    Audit,
    AuditRecord,
    Changes,
    CheckReport,
    GrantSnapshot,
    KeySnapshot,
    Outcome,
    RequestSums,
    Statement,
    StoredReply,
    StoredResponse,
    StuckSettlement,
    UsagePage,
    UsageRecord,
    UsageRow,
)
from serve_app.contracts.limiting import OpenHold
from serve_app.contracts.messages import set_state
from serve_app.contracts.money import Price

MAX_RETRIED = 100  # stuck settlements per command
MAX_SUMMED = 500_000  # requests that SumRequests reads
MAX_SEARCHED = 20_000  # requests or audit records that one search reads
MAX_MAKERS = 10_000  # audit records that KeyMakers reads

Answer = TypeVar("Answer")
Group = Literal["day", "model", "key", "account", "tag"]


class Command(Generic[Answer]):
    """An operation on the ledger. The type parameter is the type of its answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OpenAccount(Command[AccountSnapshot]):
    """Creates an account with these limits and an opening credit in nano-units. Names need not be unique.

    The same idempotency key returns the same account. Raises InvalidValue, InvalidAmount, and Conflict if the key was
    used to open an account with a different name or credit.
    """

    name: str
    currency: str = "USD"
    idempotency_key: str | None = None
    audit: Audit | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    credit: int | None = None
    credit_kind: Literal["top_up", "grant"] = "top_up"
    credit_expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class GetAccount(Command[AccountSnapshot]):
    """Returns an account. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class ShowAccount(Command[tuple[AccountSnapshot, UsageRow]]):
    """Returns an account and its total usage from one snapshot, so both include the same settlements.

    Raises AccountNotFound.
    """

    account_id: str


@dataclass(frozen=True, slots=True)
class ListAccounts(Command[list[AccountSnapshot]]):
    """Returns up to `limit` accounts, oldest first, after the account `after`. Raises AccountNotFound."""

    after: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class SetLimits(Command[AccountSnapshot]):
    """Changes the limits named in `changes` (`contracts.limits`). None restores the service's default.

    Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    changes: Mapping[str, int | None]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SetActive(Command[AccountSnapshot]):
    """Activates or suspends an account. Running requests are still settled. Raises AccountNotFound."""

    account_id: str
    active: bool
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AddCredit(Command[AccountSnapshot]):
    """Adds paid ("top_up") or given ("grant") money. Repeating it with the same idempotency key adds nothing.

    A grant with `expires_at` pays for requests that start before then. One hour later, its remainder is removed from
    the balance. Raises AccountNotFound, InvalidAmount, and InvalidValue, for example for an expiry in the past or for a
    top-up with an expiry. Raises Conflict if the idempotency key was used with a different amount, kind or expiry.
    """

    account_id: str
    amount: int
    kind: Literal["top_up", "grant"] = "top_up"
    idempotency_key: str | None = None
    memo: str = ""
    expires_at: float | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class CorrectBalance(Command[AccountSnapshot]):
    """Adds `amount`, which may be negative, to the top-ups, to correct a mistake that `memo` describes.

    Raises AccountNotFound, InvalidAmount, InvalidValue, Conflict, and InsufficientBalance if the top-ups are too small.
    """

    account_id: str
    amount: int
    memo: str
    idempotency_key: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListGrants(Command[list[GrantSnapshot]]):
    """Returns all grants, oldest first, including spent and expired ones. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class TakeBackGrant(Command[AccountSnapshot]):
    """Takes back the remainder of a grant that was a mistake; `memo` names the mistake.

    A running request that relied on it is paid from the rest of the balance. Raises AccountNotFound, GrantNotFound,
    InvalidValue, Conflict, and InsufficientBalance if nothing is left.
    """

    account_id: str
    grant_id: int
    memo: str
    idempotency_key: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ExpireGrants(Command[int]):
    """Removes from the balances the remainders of grants that expired at least an hour ago. Returns their number.

    Handles at most `limit` grants: run it again while it returns that many. Several processes may run it at the same
    time.
    """

    limit: int = 500


@dataclass(frozen=True, slots=True)
class CreateKey(Command[KeySnapshot]):
    """Stores the digest and hint of a key (`contracts.key_format`). The same digest and name return the same key.

    `terms` are fields of KeySnapshot: allowed `models`, the key's limits, a `budget` in nano-units per `budget_period`,
    `expires_at`, allowed `addresses`, and `tags`. Omitted terms set no limit. Raises AccountNotFound, InvalidValue,
    Conflict.
    """

    account_id: str
    name: str
    digest: str
    hint: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UpdateKey(Command[KeySnapshot]):
    """Changes the name and the terms in `changes`. None removes a term; removing a budget also removes its period.

    A new budget also counts what the key was charged earlier in the current period. Raises KeyNotFound, InvalidValue.
    """

    key_id: str
    changes: Mapping[str, Any]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RevokeKey(Command[KeySnapshot]):
    """Revokes a key permanently; harmless to repeat. Raises KeyNotFound."""

    key_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RotateKey(Command[KeySnapshot]):
    """Creates a key with the name and terms of an existing key, but without its expiry, and returns the new key.

    The old key expires at `until`, a Unix time, or at its own expiry if that is earlier. If that time is in the past,
    the old key is revoked. The same digest returns the same new key. Raises KeyNotFound (also for a key of another
    account), InvalidValue for a revoked key, and Conflict.
    """

    account_id: str
    key_id: str
    digest: str
    hint: str
    until: float
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListKeys(Command[list[KeySnapshot]]):
    """Returns an account's keys, oldest first, including revoked ones. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class FindKeys(Command[dict[str, tuple[KeySnapshot, AccountSnapshot]]]):
    """Returns each key and its account by the key's digest, active or not. Unknown digests are omitted.

    Looking up hundreds costs about as much as looking up one, so unknown keys cannot overload the ledger.
    """

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadChanges(Command[Changes]):
    """Returns accounts and keys that changed after version `since`, in version order. Start with 0.

    Continue from the answer's `version`, immediately if `more` is true. No change is missed, because versions become
    visible in order. A row that changed twice appears once, with its latest version.
    """

    since: int
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class SumUsage(Command[list[UsageRow]]):
    """Sums usage over requests: one row per group, sorted by group. Groups without requests have no row.

    Days are YYYY-MM-DD in UTC: a request counts on the day on which it ended. Both bounds are inclusive. Tags are the
    keys' current tags. A key with several tags counts in the row of each, and a key without tags has the tag "". Raises
    InvalidValue, for example if there are more than `most` rows.
    """

    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    day_from: str | None = None
    day_to: str | None = None
    group_by: tuple[Group, ...] = ()
    tag: str | None = None
    most: int | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class SumRequests(Command[list[RequestSums]]):
    """Sums requests that ended between two Unix times. Returns one row for each group in each hour or day (UTC).

    Unlike the rows of SumUsage, these have outcomes and durations. Archived usage is not included. Tags count as in
    SumUsage. Raises InvalidValue for more than MAX_SUMMED requests.
    """

    account_id: str
    time_from: float
    time_to: float
    by: Literal["model", "key", "tag", "outcome"] = "model"
    unit: Literal["hour", "day"] = "hour"


@dataclass(frozen=True, slots=True)
class SearchRequests(Command[UsagePage]):
    """Returns an account's requests, newest first, that ended at or after `time_from` and before `time_to`.

    Reads at most MAX_SEARCHED requests. A page may therefore be short or empty and still have a `next`: pass it as
    `after` to continue the search. Raises InvalidValue.
    """

    account_id: str
    time_from: float | None = None
    time_to: float | None = None
    model: str | None = None
    key_ids: tuple[str, ...] | None = None  # None: all keys
    outcome: Outcome | None = None
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class KeyMakers(Command[dict[str, str]]):
    """Returns the actor who created each key of an account, by key id. Keys without an audit record are omitted.

    Reads only the latest MAX_MAKERS of these records.
    """

    account_id: str


@dataclass(frozen=True, slots=True)
class ShowStatement(Command[Statement]):
    """Returns an account's statement for a month (YYYY-MM in UTC), even if the month is archived.

    Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    month: str


@dataclass(frozen=True, slots=True)
class ListUsage(Command[UsagePage]):
    """Returns one record per request that ended at or after `time_from` and before `time_to`.

    Records are ordered by account, end and request id. `after` is the `next` of the previous page. Raises InvalidValue.
    """

    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    time_from: float | None = None
    time_to: float | None = None
    after: str | None = None
    limit: int = 1000
    tag: str | None = None  # as in SumUsage

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class FindRequest(Command[UsageRecord | None]):
    """Returns a request as billed, or None if it was not settled or its month is archived."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ListRecent(Command[UsagePage]):
    """Returns requests as billed, newest first, of one account or all. The filters are those of ListUsage.

    `after` is the `next` of the previous page. A page may have fewer than `limit` requests although more follow.
    Archived requests are not included. Raises InvalidValue.
    """

    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    outcome: Outcome | None = None
    time_from: float | None = None
    time_to: float | None = None
    after: str | None = None
    limit: int = 100
    tag: str | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class FindReply(Command[StoredReply | None]):
    """Returns the reply stored under this key by a settlement of the last 24 hours, or None."""

    account_id: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class FindResponse(Command[StoredResponse | None]):
    """Returns a stored response of the account, or None."""

    account_id: str
    response_id: str


@dataclass(frozen=True, slots=True)
class DeleteResponse(Command[bool]):
    """Removes a stored response of the account, unless it still runs. Returns whether it was removed."""

    account_id: str
    response_id: str


@dataclass(frozen=True, slots=True)
class BeginResponse(Command[None]):
    """Stores a response that a gateway begins to run in the background. Harmless to repeat.

    Its settlement, or EndResponse, replaces the body and marks the response as ended.
    """

    account_id: str
    response: StoredResponse


@dataclass(frozen=True, slots=True)
class BeatResponses(Command[tuple[tuple[str, str], ...]]):
    """Records that a gateway still runs these responses (account and response id). Returns those to be cancelled."""

    responses: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CancelResponse(Command[StoredResponse | None]):
    """Asks the gateway that runs a response to cancel it. Returns the response, or None if it is not stored."""

    account_id: str
    response_id: str


@dataclass(frozen=True, slots=True)
class EndResponse(Command[bool]):
    """Ends a running response, without a settlement, and stores its final body. Returns whether it was running."""

    account_id: str
    response: StoredResponse


@dataclass(frozen=True, slots=True)
class FindUnsettled(Command[list[str]]):
    """Checks up to 1000 requests. Returns, in order, those that the ledger has neither settled nor kept as stuck."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListStuck(Command[list[StuckSettlement]]):
    """Returns stuck settlements after `after`, in the order of their ids."""

    after: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RetryStuck(Command[list[StuckSettlement]]):
    """Retries these stuck settlements and returns those that are still stuck.

    At most MAX_RETRIED ids; unknown ids are ignored. Harmless to repeat.
    """

    stuck_ids: tuple[str, ...]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class PruneReplies(Command[int]):
    """Removes up to 1000 replies older than 24 hours and up to 1000 expired responses. Returns the number removed."""


@dataclass(frozen=True, slots=True)
class RecordAudit(Command[None]):
    """Records an event that changes nothing in the ledger, such as a failed log-in or a read.

    An empty account stands for the service. Raises InvalidValue.
    """

    audit: Audit
    action: str
    subject: str
    account_id: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordPrices(Command[None]):
    """Records the prices, by model, that differ from the last recorded ones; harmless to repeat."""

    prices: Mapping[str, Price]
    audit: Audit


@dataclass(frozen=True, slots=True)
class PricedModels(Command[list[str]]):
    """Returns each identifier for which a request was ever settled."""


@dataclass(frozen=True, slots=True)
class ListAudit(Command[list[AuditRecord]]):
    """Returns audit records, newest first: operators' changes and reads, failed log-ins and new prices.

    `after` is the last record of the previous page. `actor` is a part of the actor's name; case is ignored. A search by
    actor or action reads at most MAX_SEARCHED records before `after`: to search further, reduce `after` by
    MAX_SEARCHED. Raises InvalidValue.
    """

    account_id: str | None = None
    after: int | None = None
    limit: int = 100
    actor: str | None = None
    action: str | None = None

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class CheckBooks(Command[CheckReport]):
    """Checks the ledger for consistency, in short steps, for about `seconds`. The service may run meanwhile.

    The check starts at the last checkpoint, or with `full` at the beginning. If the answer has a `next`, run the
    command again with it as `after`. Each answer has only the differences that its steps found. Raises InvalidValue,
    and Conflict if another full check or an archive has replaced the data that this check builds on: start again.
    """

    full: bool = False
    after: str | None = None
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Blocker:
    """A lease that blocks the caller's lease. Its holder may use it for `lasts_s` seconds after each renewal."""

    epoch: int
    renewals: int
    holder: str
    lasts_s: float


@dataclass(frozen=True, slots=True)
class LeaseState:
    """State of a requested lease. With an `epoch`, the caller holds it; otherwise `blockers` prevent it."""

    epoch: int | None
    renewals: int = 0
    wanted: int = 0  # requests that waited at other limiters since the previous renewal
    holds: tuple[OpenHold, ...] = ()  # all posted holds, for accounts of any shard
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True, slots=True)
class HoldLease(Command[LeaseState]):
    """Takes or renews the lease of a limiter shard: see `accounting/limiter_leases.py`.

    `holder` identifies one limiter process. `ended` lists epochs whose process is known to have ended. `over` lists
    pairs of epoch and renewals that stayed unchanged for the lease's whole duration. `waiting` is the number of
    requests that wait for the lease.
    """

    shard: int
    shards: int
    holder: str
    lasts_s: float
    waiting: int = 0
    ended: tuple[int, ...] = ()
    over: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseLease(Command[bool]):
    """Ends a lease, and posts the open holds of its holder by owner. Returns False for an unknown lease."""

    epoch: int
    holds: Mapping[str, tuple[OpenHold, ...]]


@dataclass(frozen=True, slots=True)
class PostHolds(Command[bool]):
    """Replaces the owner's posted holds with these. Holds that are already settled are omitted."""

    owner: str
    holds: tuple[OpenHold, ...]
