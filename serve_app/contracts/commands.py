"""The operations on the books, one command each: `AccountingPort.run` returns the command's answer.

Amounts are nano-units, times are Unix seconds. Each command names the errors of `contracts.errors` that it raises
beside LedgerUnavailable. A write that raises LedgerUnavailable may have happened: repeat it unchanged; its idempotency
key, or the value that it sets, makes the repetition harmless. With an `audit`, a change is recorded in the audit log;
what changes nothing is not.
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
    Statement,
    StoredReply,
    StuckSettlement,
    UsagePage,
    UsageRecord,
    UsageRow,
)
from serve_app.contracts.limiting import OpenHold
from serve_app.contracts.messages import set_state
from serve_app.contracts.money import Price

MAX_RETRIED = 100  # stuck settlements of one command

Answer = TypeVar("Answer")
Group = Literal["day", "model", "key", "account", "tag"]


class Command(Generic[Answer]):
    """One operation on the books, with the type of its answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OpenAccount(Command[AccountSnapshot]):
    """Creates an account with these limits and an opening credit in nano-units. Names need not be unique.

    The same idempotency key returns the same account. Raises InvalidValue, InvalidAmount, and Conflict when the key has
    opened an account of another name or credit.
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
    """Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class ShowAccount(Command[tuple[AccountSnapshot, UsageRow]]):
    """An account and all that it ever used, as of one moment: no settlement is in one and not in the other.

    Raises AccountNotFound.
    """

    account_id: str


@dataclass(frozen=True, slots=True)
class ListAccounts(Command[list[AccountSnapshot]]):
    """Up to `limit` accounts, oldest first, after the account `after`. Raises AccountNotFound."""

    after: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class SetLimits(Command[AccountSnapshot]):
    """Changes the limits that `changes` names (`contracts.limits`); None takes the service's default.

    Raises AccountNotFound, InvalidValue.
    """

    account_id: str
    changes: Mapping[str, int | None]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class SetActive(Command[AccountSnapshot]):
    """Lets an account send requests, or stops it; running requests are still settled. Raises AccountNotFound."""

    account_id: str
    active: bool
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class AddCredit(Command[AccountSnapshot]):
    """Adds paid ("top_up") or given ("grant") money. The same idempotency key on the same account adds it once.

    A grant with `expires_at` pays for requests that start before then; an hour later what is left of it leaves the
    books. Raises AccountNotFound, InvalidAmount, InvalidValue (also for an expiry that is past, or of a top-up), and
    Conflict when the idempotency key was used for another amount, kind or expiry.
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
    """Adds to the top-ups, or takes from them if negative, to correct a mistake that `memo` names.

    Raises AccountNotFound, InvalidAmount, InvalidValue, Conflict, and InsufficientBalance when less is left.
    """

    account_id: str
    amount: int
    memo: str
    idempotency_key: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListGrants(Command[list[GrantSnapshot]]):
    """All grants, oldest first, spent and expired ones included. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class TakeBackGrant(Command[AccountSnapshot]):
    """Takes back what is left of a grant that was a mistake, which `memo` names.

    A running request that counted on it is paid from the rest of the balance. Raises AccountNotFound, GrantNotFound,
    InvalidValue, Conflict, and InsufficientBalance when nothing is left.
    """

    account_id: str
    grant_id: int
    memo: str
    idempotency_key: str | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ExpireGrants(Command[int]):
    """Removes the rest of grants that expired an hour ago or longer from the balances; returns how many grants.

    At most `limit` at once: run it again while it returns that many. Processes may do this at the same time.
    """

    limit: int = 500


@dataclass(frozen=True, slots=True)
class CreateKey(Command[KeySnapshot]):
    """Stores a key by its digest and hint (`contracts.key_format`); the same digest and name return the same key.

    `terms` are fields of KeySnapshot: `models` that it may use, limits of its own, a `budget` in nano-units per
    `budget_period`, `expires_at`, `addresses` that it may be used from, and `tags`. Terms that are left out set no
    bound. Raises AccountNotFound, InvalidValue, Conflict.
    """

    account_id: str
    name: str
    digest: str
    hint: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class UpdateKey(Command[KeySnapshot]):
    """Changes the name and the terms that `changes` names; None removes a bound, for a budget its period too.

    A new budget counts what the key has been charged in the current period already. Raises KeyNotFound,
    InvalidValue.
    """

    key_id: str
    changes: Mapping[str, Any]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RevokeKey(Command[KeySnapshot]):
    """Ends a key for good; harmless to repeat. Raises KeyNotFound."""

    key_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class RotateKey(Command[KeySnapshot]):
    """Creates a key with the name and terms of another one, without an expiry, and returns it.

    The old key expires at `until`, a Unix time, or at its own expiry if that comes first. A time that is past revokes
    it. The same digest returns the same key. Raises KeyNotFound, also for a key of another account, InvalidValue for a
    key that is revoked, and Conflict.
    """

    account_id: str
    key_id: str
    digest: str
    hint: str
    until: float
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class ListKeys(Command[list[KeySnapshot]]):
    """Oldest first, revoked ones included. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class FindKeys(Command[dict[str, tuple[KeySnapshot, AccountSnapshot]]]):
    """The keys with these digests and their accounts, active or not, by digest; without those that do not exist.

    Looking up hundreds costs about as much as looking up one, so unknown keys cannot overload the ledger.
    """

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadChanges(Command[Changes]):
    """Accounts and keys that changed after version `since`, in the order of their versions; 0 starts.

    Read on from the answer's `version`, at once if it has `more`. Nothing is ever missed: versions become visible in
    their order. A row that changed twice appears once, with its latest version.
    """

    since: int
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class SumUsage(Command[list[UsageRow]]):
    """Sums over requests, one row per group, sorted by the groups; no row where there was no request.

    Days are YYYY-MM-DD in UTC, of the requests' ends, both included. Tags are those that the keys have now: a key with
    several counts in the row of each, and one without has the tag "". Raises InvalidValue, also for more rows than
    `most`.
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
class SumHours(Command[list[UsageRow]]):
    """As SumUsage, of the hours of UTC between two Unix times: a row for each hour and group with a request.

    It reads single requests, so the times should not be far apart; what is archived is not in it.
    """

    account_id: str
    time_from: float
    time_to: float
    by: Literal["model", "key", "tag"] = "model"


@dataclass(frozen=True, slots=True)
class ShowStatement(Command[Statement]):
    """Of an account's month, YYYY-MM in UTC, archived or not. Raises AccountNotFound, InvalidValue."""

    account_id: str
    month: str


@dataclass(frozen=True, slots=True)
class ListUsage(Command[UsagePage]):
    """One record per request that ended at or after `time_from` and before `time_to`.

    In the order of accounts, ends and request ids. `after` is the `next` of the page before.
    Raises InvalidValue.
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
    """A request as billed, or None: it was not settled, or its month is archived."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FindReply(Command[StoredReply | None]):
    """The reply that a settlement of the last 24 hours has stored, or None."""

    account_id: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class FindUnsettled(Command[list[str]]):
    """Those of up to 1000 requests that the ledger has neither settled nor keeps as stuck, in order."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListStuck(Command[list[StuckSettlement]]):
    """Stuck settlements in the order of their ids, after `after`."""

    after: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RetryStuck(Command[list[StuckSettlement]]):
    """Settles these again; what is settled now, or was meanwhile, is stuck no more. Returns what still is.

    At most 100 ids; unknown ones are passed over. Harmless to repeat.
    """

    stuck_ids: tuple[str, ...]
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class PruneReplies(Command[int]):
    """Removes up to 1000 replies older than 24 hours; returns how many."""


@dataclass(frozen=True, slots=True)
class RecordAudit(Command[None]):
    """Records what changes nothing in the books, such as a failed log-in or a read. An empty account: the service.

    Raises InvalidValue.
    """

    audit: Audit
    action: str
    subject: str
    account_id: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordPrices(Command[None]):
    """Records those prices, by model, that differ from the last ones recorded; harmless to repeat."""

    prices: Mapping[str, Price]
    audit: Audit


@dataclass(frozen=True, slots=True)
class PricedModels(Command[list[str]]):
    """Identifiers that ever had a price in a settled request."""


@dataclass(frozen=True, slots=True)
class ListAudit(Command[list[AuditRecord]]):
    """What operators changed and read, failed log-ins and new prices, newest first. Raises InvalidValue.

    `after` is the last record of the page before.
    """

    account_id: str | None = None
    after: int | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class CheckBooks(Command[CheckReport]):
    """Compares what must agree, in short steps for about `seconds`, while the service runs.

    From the last checkpoint, or with `full` from the beginning. Where the answer has a `next`, run it again with that
    as `after`; each answer has the differences of its own steps. Raises InvalidValue, and Conflict when another full
    check or an archive has replaced what this one builds on: begin again.
    """

    full: bool = False
    after: str | None = None
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Blocker:
    """A lease that stands in the way of another one. `lasts_s`: how long it may be used after a renewal."""

    epoch: int
    renewals: int
    holder: str
    lasts_s: float


@dataclass(frozen=True, slots=True)
class LeaseState:
    """With an `epoch` the lease is held by who asked, else `blockers` are in the way."""

    epoch: int | None
    renewals: int = 0
    wanted: int = 0  # requests that waited at other limiters since the renewal before
    holds: tuple[OpenHold, ...] = ()  # all that are posted, of accounts of any shard
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True, slots=True)
class HoldLease(Command[LeaseState]):
    """Takes the lease of a limiter shard, or renews it: see `accounting/limiter_leases.py`.

    `holder` names a limiter process and no other. `ended`: epochs whose process is known to have ended. `over`: epochs
    and their renewals that were seen unchanged for as long as they last. `waiting`: requests that wait for the lease.
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
    """Ends a lease that its holder uses no more, and posts its open holds, by owner. False: it was not held."""

    epoch: int
    holds: Mapping[str, tuple[OpenHold, ...]]


@dataclass(frozen=True, slots=True)
class PostHolds(Command[bool]):
    """These and no others are the owner's posted holds; what is settled already is left out."""

    owner: str
    holds: tuple[OpenHold, ...]
