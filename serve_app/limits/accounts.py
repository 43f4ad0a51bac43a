"""An account's committed balance, what is set aside from it, and its rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_app.limits.gcra import Bucket
from serve_app.limits.holds import Hold
from serve_app.limits.messages import AccountState, Contract
from serve_app.limits.periods import CLOCK_SKEW_S

if TYPE_CHECKING:
    from serve_app.limits.keys import Key


class Account:
    """An account's committed balance, its open holds, and its rate buckets.

    Why the free balance is never overstated. Every charge is covered by a hold that is at least as large. The ledger
    commits a charge and raises the account's version in one step. A hold is removed only in the step that also brings
    the balance to the version of its settlement or a later one (`close`); a state of an older version is ignored
    (`apply`, `commit`). So at every moment each admitted request is in one of three states: unsettled and held;
    settled, not yet seen, and held; settled and contained in the balance seen here. Its charge is therefore taken
    from `free` at least once: `free <= committed balance - charges still to come`. Deposits and settlements not yet
    seen only make `free` too small. What this does not cover: an operator lowering a balance is seen when the state
    arrives, not before; and a hold whose lease has run out is no longer held, so within the lease a dead
    gateway's request must be settled, or known never to be, or its hold taken over together with its spool.

    Why that stays true with grants that expire. The balance contains what is left of them (`expiring`) until the
    ledger takes the rest out, long after the expiry; a request may be paid from a grant that had not expired when it
    began, and each charge takes the soonest expiring grant first. So of an expired rest nobody can use what exceeds
    the holds opened before its expiry (`expired`); as a grant that an earlier hold may use is usable for every hold
    before it, pairing rests with holds in the order of expiry pairs as much as any other way. A settlement brings a
    balance without the grants in it, so `expiring` may be older than `balance`. It then shows rests as they were
    before charges, which is too much, and what is taken off `free` is too much as well; only of a grant that came
    and expired between two looks at the ledger's changes it knows nothing. It does not stay old: every settlement
    also reaches the limiter as a change of the account, with the version that is known already, and a state of an
    equal version replaces everything but the balance, which by that version is the same.
    """

    __slots__ = (
        "account_id",
        "active",
        "balance",
        "contract",
        "expiring",
        "held",
        "holds",
        "idempotent",
        "keys",
        "mean_output",
        "own",
        "requests",
        "tokens",
        "version",
    )

    def __init__(self, account_id: str, contract: Contract) -> None:
        self.account_id = account_id
        self.active = True
        self.balance: int | None = None  # None until the ledger has told; holds count all the same
        self.version = -1
        self.expiring: tuple[tuple[float, int], ...] = ()  # as in AccountState
        self.held = 0
        self.holds: dict[str, Hold] = {}
        self.idempotent: dict[str, str] = {}  # idempotency keys of open requests, with the request
        self.keys: dict[str, Key] = {}  # by key_id
        self.mean_output: float | None = None  # tokens a reply, moving average; None before the first
        self.own: AccountState | None = None  # as last applied: which limits are the account's own
        self.contract = contract
        self.requests = Bucket(contract.rpm)
        self.tokens = Bucket(contract.tpm)

    def apply(self, state: AccountState, default: Contract) -> bool:
        """Takes over a committed state; False and no change when it is older than what is known."""
        if state.version < self.version:
            return False
        if state.version > self.version or self.balance is None:
            self.version = state.version
            self.balance = state.balance
        self.active = state.active
        self.expiring = state.expiring
        own, self.own = self.own, state
        if own is None or _limits(own) != _limits(state):
            self.limit(default)
        return True

    def limit(self, default: Contract) -> None:
        """Sets the limits: the account's own, and the default's where it has none. What is in use stays in use."""
        own = self.own
        self.contract = Contract(
            rpm=default.rpm if own is None or own.rpm is None else own.rpm,
            tpm=default.tpm if own is None or own.tpm is None else own.tpm,
            concurrency=default.concurrency if own is None or own.concurrency is None else own.concurrency,
            weight=default.weight if own is None or own.weight is None else own.weight,
        )
        self.requests.limit = self.contract.rpm
        self.tokens.limit = self.contract.tpm

    def commit(self, balance: int, version: int) -> None:
        """Takes over a balance that a settlement brought, unless a newer one is known.

        While the balance is unknown only the version is kept: whether the account is active comes with `apply` alone,
        and a look-up that was read before this settlement must then be refused as old.
        """
        if version > self.version:
            self.version = version
            if self.balance is not None:
                self.balance = balance

    @property
    def free(self) -> int:
        """Nano-units that no hold has a claim on; negative when an operator took away what was already held."""
        return (self.balance or 0) - self.held

    def expired(self, at: float) -> int:
        """Nano-units of the balance that a request that begins at the Unix time `at`, or any later one, can't use."""
        if not self.expiring or self.expiring[0][0] - CLOCK_SKEW_S > at:
            return 0
        rest = claimed = 0
        for expires_at, left in self.expiring:
            last = expires_at - CLOCK_SKEW_S  # the ledger compares the time that a gateway's clock has given
            if last > at:
                break
            before = sum(hold.amount for hold in self.holds.values() if hold.opened_at < last)
            claim = min(left, before - claimed)
            claimed += claim
            rest += left - claim
        return rest

    def spendable(self, at: float) -> int:
        """Nano-units that a request that begins at the Unix time `at` may still set aside; can be negative."""
        return self.free - self.expired(at)

    def is_settled(self, now: float) -> bool:
        """Whether nothing of it counts any more: no request is open, and its rates have drained."""
        return not self.holds and not self.requests.reset_s(now) and not self.tokens.reset_s(now)

    def open(self, request_id: str, hold: Hold) -> None:
        """Sets the hold's amount aside, of the key's budget too, and takes a concurrency slot of both."""
        key = hold.key
        self.holds[request_id] = hold
        self.held += hold.amount
        key.held += hold.amount
        key.open += 1
        if hold.idempotency_key is not None:
            self.idempotent.setdefault(hold.idempotency_key, request_id)

    def resize(self, hold: Hold, amount: int) -> None:
        """Changes what an open hold sets aside."""
        more = amount - hold.amount
        self.held += more
        hold.key.held += more
        hold.amount = amount

    def close(self, request_id: str) -> Hold:
        """Frees the hold, its slots and its idempotency key. Raises KeyError when it is not open."""
        hold = self.holds.pop(request_id)
        key = hold.key
        self.held -= hold.amount
        key.held -= hold.amount
        key.open -= 1
        if hold.idempotency_key is not None and self.idempotent.get(hold.idempotency_key) == request_id:
            del self.idempotent[hold.idempotency_key]
        return hold


def _limits(state: AccountState) -> tuple[int | None, ...]:
    return state.rpm, state.tpm, state.concurrency, state.weight
