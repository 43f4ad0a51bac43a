"""Tracks accounts and keys: committed balances and budgets, the amounts held from them, and their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf

from serve_app.contracts.addresses import Address, Network, allowed_networks
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import Window
from serve_app.contracts.limits import RATES, Contract, Unit
from serve_app.contracts.periods import CLOCK_SKEW_S, Period, period_at
from serve_app.contracts.rates import Bucket
from serve_app.limiter.holds import Charge, Hold


class LimitBucket(Bucket):
    """The bucket for one rate limit of an account or a key. A key's requests also count in its account's buckets."""

    __slots__ = ("name", "of_key", "rate")

    def __init__(self, name: str, limit: int, of_key: bool) -> None:
        self.name = name
        self.rate = RATES[name]
        self.of_key = of_key
        super().__init__(limit, self.rate.window_s)


def tightest(buckets: Sequence[LimitBucket], now: float) -> Window:
    """Returns the window of the bucket with the least room, for the headers. At equal room, the lower limit wins."""
    tightest = buckets[0].state(now)
    for bucket in buckets[1:]:
        tightest = min(tightest, bucket.state(now))
    remaining, limit, reset_s = tightest
    return Window(limit, remaining, reset_s)


def _buckets(
    unit: Unit, limits: Mapping[str, int], known: Sequence[LimitBucket], of_key: bool = False
) -> tuple[LimitBucket, ...]:
    """Returns a bucket for each limit of the unit: the known one, with its current use, or a new one."""
    kept = {bucket.name: bucket for bucket in known if bucket.of_key == of_key}
    buckets = []
    for name, rate in RATES.items():
        if rate.unit == unit and name in limits:
            bucket = kept.get(name) or LimitBucket(name, limits[name], of_key)
            bucket.limit = limits[name]
            buckets.append(bucket)
    return tuple(buckets)


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """An account's committed balance, its open holds, and its rate buckets.

    Why the free balance is never overstated: every charge is covered by a hold that is at least as large. The ledger
    commits a charge and raises the account's version in one step. A hold is removed only in the step that also brings
    the balance to the version of its settlement or a later one (`Admission.release`). A snapshot of an older version is
    ignored (`apply`, `update_balance`). So at every moment each admitted request is in one of three states:

    - not settled, and held;
    - settled, the new balance not known here yet, and held;
    - settled, and contained in the balance known here.

    So its charge is taken from `free` at least once: `free <= committed balance - charges still to come`. Deposits and
    settlements that are not known here yet only make `free` too small.

    Two cases are not covered. When an operator lowers a balance, this is known here only once the snapshot arrives. And
    a hold is freed when its lease expires, settled or not. This is safe only if one of three things has happened to the
    dead gateway's request by then: it was settled, it can certainly never be settled, or another gateway has taken over
    the hold together with the spool.

    Why this stays true with grants that expire: the balance contains the remainder of each grant (`expiring`) until the
    ledger removes it, long after the expiry. A request may be paid from a grant that had not expired when the request
    began, and each charge uses the grant that expires soonest. So only the holds opened before the expiry can use an
    expired remainder. The part that exceeds these holds cannot be used at all. `expired` assigns the remainders to the
    holds, the earliest expiry first. Fewer holds can use an early remainder than a late one, so this order leaves the
    smallest unused amount.

    A settlement reports the balance, but not the grants in it. So `expiring` may be older than `balance`, and contain
    remainders from before some charges. Such remainders are too large, so too much is subtracted from `free`, which is
    safe. The only grant missing from `expiring` is one that was added and expired between two reads of the ledger's
    changes. `expiring` does not stay old: every settlement also reaches the limiter as a change of the account, with a
    version that is already known. A snapshot of an equal version replaces everything but the balance, which is the
    same.
    """

    account_id: str
    contract: Contract  # the limits that apply now
    snapshot: AccountSnapshot | None = None  # the last one applied; holds count even while it is None
    balance: int | None = None  # nano-units; None until a snapshot was applied
    version: int = -1
    held: int = 0  # nano-units
    holds: dict[str, Hold] = field(default_factory=dict)
    idempotent: dict[str, str] = field(default_factory=dict)  # idempotency key -> open request
    keys: dict[str, Key] = field(default_factory=dict)  # by key_id
    mean_output: float | None = None  # tokens per reply, moving average; None before the first reply
    requests: tuple[LimitBucket, ...] = ()
    tokens: tuple[LimitBucket, ...] = ()

    def __post_init__(self) -> None:
        self.limit(self.contract)

    def apply(self, snapshot: AccountSnapshot, default: Contract, now: float) -> None:
        """Applies a committed state unless it is older than the known one."""
        if snapshot.version < self.version:
            return
        if snapshot.version > self.version or self.balance is None:
            self.version = snapshot.version
            self.balance = snapshot.balance
        known, self.snapshot = self.snapshot, snapshot
        if known is None or known.limits != snapshot.limits:
            self.limit(default)
        if known is None:
            self._recharge_announced(now)

    def _recharge_announced(self, now: float) -> None:
        """Empties the token buckets, then charges them for the holds that gateways announced before the first snapshot.

        Those charges were made under the default limits, because the account's own limits were not known.
        """
        for bucket in self.tokens:
            bucket.tat = -inf
        for hold in self.holds.values():
            hold.tokens = [
                Charge(charge.bucket, now, charge.units) if charge.bucket in self.tokens else charge
                for charge in hold.tokens
            ]

    def limit(self, default: Contract) -> None:
        """Sets the limits: the account's, and the default's where the account has none. Current use is kept."""
        self.contract = default if self.snapshot is None else default.with_own(self.snapshot.limits)
        limits = asdict(self.contract)
        self.requests = _buckets("requests", limits, self.requests)
        self.tokens = _buckets("tokens", limits, self.tokens)

    def update_balance(self, balance: int, version: int) -> None:
        """Sets the balance after a settlement, unless a newer one is known.

        While the balance is unknown, stores only the version, so that the result of a look-up is ignored as old if it
        was read before this settlement. The first balance must come from `apply`, which also learns whether the account
        is active.
        """
        if version > self.version:
            self.version = version
            if self.balance is not None:
                self.balance = balance

    @property
    def free(self) -> int:
        """Nano-units that are not held. Negative if an operator has lowered the balance below the holds."""
        return (self.balance or 0) - self.held

    def expired(self, at: float) -> int:
        """Returns the nano-units of the balance that no request beginning at the Unix time `at` or later can use."""
        expiring = self.snapshot.expiring if self.snapshot is not None else ()
        if not expiring or expiring[0][0] - CLOCK_SKEW_S > at:
            return 0
        rest = claimed = 0
        for expires_at, left in expiring:
            last = expires_at - CLOCK_SKEW_S  # a gateway's clock, which may lag, decides what began before the expiry
            if last > at:
                break
            before = sum(hold.amount for hold in self.holds.values() if hold.opened_at < last)
            claim = min(left, before - claimed)
            claimed += claim
            rest += left - claim
        return rest

    def spendable(self, at: float) -> int:
        """Returns the nano-units that a request beginning at the Unix time `at` may set aside; can be negative."""
        return self.free - self.expired(at)

    def is_drained(self, now: float) -> bool:
        """Returns whether the account can be dropped: no request is open, and its rate buckets have drained."""
        return not self.holds and not any(bucket.reset_s(now) for bucket in (*self.requests, *self.tokens))

    def open(self, hold: Hold) -> None:
        """Holds the amount from the balance and the key's budget, and takes a concurrency slot of account and key."""
        key = hold.key
        self.holds[hold.request_id] = hold
        self.held += hold.amount
        key.held += hold.amount
        key.open += 1
        if hold.terms.idempotency_key is not None:
            self.idempotent.setdefault(hold.terms.idempotency_key, hold.request_id)

    def resize(self, hold: Hold, amount: int) -> None:
        """Changes the amount that an open hold sets aside."""
        more = amount - hold.amount
        self.held += more
        hold.key.held += more
        hold.amount = amount

    def close(self, hold: Hold) -> None:
        """Frees an open hold, its slots and its idempotency key."""
        key, idempotency_key = hold.key, hold.terms.idempotency_key
        del self.holds[hold.request_id]
        self.held -= hold.amount
        key.held -= hold.amount
        key.open -= 1
        if idempotency_key is not None and self.idempotent.get(idempotency_key) == hold.request_id:
            del self.idempotent[idempotency_key]


@dataclass(slots=True, eq=False, repr=False)
class Key:
    """A key's last applied snapshot, its open requests, and the rate buckets that they are charged to.

    Why a budget is never overspent: as with balances (see Account), a hold is removed only in the step that also brings
    the key's spending to the version of the hold's settlement or a later one. Older figures are ignored. So each charge
    is taken from `left` at least once. A charge counts in the period in which its request ends, and requests can run
    past the end of a period. So the holds of all open requests, even of those admitted in an earlier period, are taken
    from the current period's budget. Each charge then fits, in whichever period its request ends.

    Clocks differ by up to CLOCK_SKEW_S. A period begins and ends that much later here, because by a gateway's clock, a
    request may still end in it. During these seconds, the ledger may already report the next period, and no longer the
    one that is current here. The key then keeps the last figure of its current period (`_ending`), and adds the full
    amount of each hold that is removed (`freed`). The new figure counts as well: `left` takes the larger of the two. If
    the key has no last figure, the spending of its current period is unknown until that period ends here (`unsure_s`).
    """

    account: Account
    key_id: str
    snapshot: KeySnapshot | None = None  # the last one applied; holds count even while it is None
    networks: tuple[Network, ...] | None = None  # allowed networks; None: any
    held: int = 0  # nano-units
    open: int = 0  # requests
    requests: tuple[LimitBucket, ...] = ()  # the account's, then the key's
    tokens: tuple[LimitBucket, ...] = ()
    own_tokens: tuple[LimitBucket, ...] = ()  # buckets of the key's own token limits
    mean_output: float | None = None  # as for Account; updated only if the key has a token limit
    spent: int = 0  # nano-units in `spent_period`, as of the account's version `spent_version`
    spent_period: str = ""
    spent_version: int = -1
    _ending: tuple[int, str] = (0, "")  # the last figure for the period before `spent_period`
    _period: Period | None = None  # the last result of `period`

    def __post_init__(self) -> None:
        self.requests, self.tokens = self.account.requests, self.account.tokens

    def apply(self, snapshot: KeySnapshot, now: float) -> bool:
        """Applies a committed state. Returns False and changes nothing unless it is newer than the known one.

        `spent` has a separate version, because a settlement may have brought a newer figure.
        """
        if self.snapshot is not None and snapshot.version <= self.snapshot.version:
            return False
        self.snapshot = snapshot
        self.networks = None if snapshot.addresses is None else allowed_networks(snapshot.addresses)
        self._limit(snapshot.limits, now)
        if snapshot.spent_version >= self.spent_version:
            self._spend(snapshot.spent, snapshot.spent_period, snapshot.spent_version)
        self._period = None
        return True

    @property
    def is_known(self) -> bool:
        """Whether the ledger's state of the key and of its account was applied."""
        return self.snapshot is not None and self.account.snapshot is not None

    def allows(self, address: Address | None) -> bool:
        """Returns whether the key may be used from `address`; None is an unknown address."""
        if self.networks is None:
            return True
        return address is not None and any(address in network for network in self.networks)

    def _limit(self, own: Mapping[str, int], now: float) -> None:
        """Sets the key's limits. Current use is kept."""
        known = self.own_tokens
        self.own_tokens = _buckets("tokens", own, known, of_key=True)
        self.tokens = self.account.tokens + self.own_tokens
        self.requests = self.account.requests + _buckets("requests", own, self.requests, of_key=True)
        # Charges requests that began before the limit was known, mainly those from before a restart of the limiter.
        for bucket in self.own_tokens:
            if bucket not in known:
                for hold in self.account.holds.values():
                    if hold.key is self:
                        hold.tokens.append(Charge(bucket, now, hold.tokens_charged))

    def update_spent(self, spent: int, period: str, version: int) -> None:
        """Sets the spent amount that a settlement reports, unless a newer one is known."""
        if version > self.spent_version:
            self._spend(spent, period, version)

    def _spend(self, spent: int, period: str, version: int) -> None:
        if period != self.spent_period:
            # While the key was unknown, removed holds were not counted (see `freed`), so the old figure is too low.
            self._ending = (0, "") if self.snapshot is None else (self.spent, self.spent_period)
        self.spent, self.spent_period, self.spent_version = spent, period, version

    def period(self, at: float) -> Period:
        """Returns the budget's period at the Unix time `at`. Each period begins and ends CLOCK_SKEW_S late."""
        assert self.snapshot is not None
        at -= CLOCK_SKEW_S
        period = self._period
        if period is None or not period.begins <= at < period.ends:
            period = self._period = period_at(self.snapshot.budget_period or "month", at)
        return period

    def left(self, at: float) -> int:
        """Returns the nano-units of the budget that are neither spent nor held at the Unix time `at`; can be negative.

        Only for a key with a budget.
        """
        assert self.snapshot is not None
        assert self.snapshot.budget is not None
        name = self.period(at).name
        figures = (self.spent, self.spent_period), self._ending
        return self.snapshot.budget - self.held - max((spent for spent, period in figures if period >= name), default=0)

    def unsure_s(self, at: float) -> float:
        """Returns the seconds from the Unix time `at` during which the period's spending is unknown; usually 0."""
        period = self.period(at)
        if self.spent_period <= period.name or self._ending[1] == period.name:
            return 0.0
        left_s = period.ends - (at - CLOCK_SKEW_S)
        # A longer time means that the ledger's clock is ahead by more than the skew. The figure that the ledger reports
        # is then used alone, because spending would otherwise be unknown for hours.
        return left_s if left_s <= 2 * CLOCK_SKEW_S else 0.0

    def freed(self, amount: int, at: float) -> None:
        """Counts a hold removed at the Unix time `at` as spent, if the ledger no longer reports the period of `at`."""
        name = self.period(at).name
        if self.spent_period > name == self._ending[1]:
            self._ending = self._ending[0] + amount, name

    def is_drained(self, now: float) -> bool:
        """Returns whether the key can be dropped: no request is open, and its own rate buckets have drained."""
        return not self.open and not any(
            bucket.of_key and bucket.reset_s(now) for bucket in (*self.requests, *self.tokens)
        )


class Registry:
    """Accounts by id and keys by digest. Drops entries that stay idle; their next request looks them up again.

    `_idle` contains the keys without open requests and the accounts without keys, the longest idle first. When a
    request ends, a snapshot or settlement arrives, or `forget_idle` finds a bucket that has not drained, the entry
    moves to the end. So the last known version of an entry is kept at least for the idle time. A look-up that returns
    an older version is recognised as old, provided that look-ups do not take longer than that.
    """

    def __init__(self, default: Contract) -> None:
        self.default = default
        self.accounts: dict[str, Account] = {}
        self.keys: dict[str, Key] = {}
        self._idle: dict[Key | Account, float] = {}  # since when each has been idle

    def set_default(self, contract: Contract) -> None:
        """Changes the default limits, which apply where an account has none."""
        self.default = contract
        for account in self.accounts.values():
            account.limit(contract)

    def account_or_new(self, account_id: str, now: float) -> Account:
        """Returns the account, or a new one without a snapshot."""
        account = self.accounts.get(account_id)
        if account is None:
            account = self.accounts[account_id] = Account(account_id, self.default)
            self._idle[account] = now
        return account

    def key_or_new(self, account: Account, key_id: str, now: float) -> Key:
        """Returns the account's key, or a new one without a snapshot."""
        key = account.keys.get(key_id)
        if key is None:
            key = account.keys[key_id] = Key(account, key_id)
            self._idle.pop(account, None)
            self._idle[key] = now
        return key

    def touch(self, owner: Key | Account, now: float) -> None:
        """Restarts the idle time of an idle key or account. No effect on others."""
        if self._idle.pop(owner, None) is not None:
            self._idle[owner] = now

    def apply(self, snapshot: AccountSnapshot | KeySnapshot, now: float) -> None:
        """Applies a committed state. Ignores it if it is older than the known one."""
        account = self.account_or_new(snapshot.account_id, now)
        if isinstance(snapshot, AccountSnapshot):
            account.apply(snapshot, self.default, now)
            self.touch(account, now)
            return
        key = self.key_or_new(account, snapshot.key_id, now)
        if key.apply(snapshot, now):
            self.keys[snapshot.digest] = key
        self.touch(key, now)

    def open(self, hold: Hold) -> None:
        if not hold.key.open:
            del self._idle[hold.key]
        hold.key.account.open(hold)

    def close(self, hold: Hold, now: float) -> None:
        hold.key.account.close(hold)
        if not hold.key.open:
            self._idle[hold.key] = now

    def forget_idle(self, idle_s: float, most: int, now: float) -> int:
        """Forgets keys and accounts that have been idle for `idle_s` seconds. Returns the number forgotten.

        Checks at most `most` of them, the longest idle first. Entries whose buckets have not drained stay for a later
        round.
        """
        forgotten = 0
        for owner, since in list(islice(self._idle.items(), most)):
            if since > now - idle_s:
                break
            if owner.is_drained(now):
                self._forget(owner, now)
                forgotten += 1
            else:
                self.touch(owner, now)
        return forgotten

    def _forget(self, owner: Key | Account, now: float) -> None:
        del self._idle[owner]
        if isinstance(owner, Account):
            del self.accounts[owner.account_id]
            return
        if owner.snapshot is not None:
            del self.keys[owner.snapshot.digest]
        keys = owner.account.keys
        del keys[owner.key_id]
        if not keys:
            self._idle[owner.account] = now
