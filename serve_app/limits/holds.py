"""Balances with what is set aside from them, and the leases that the set-aside parts live under."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from serve_app.limits.gcra import Bucket
from serve_app.limits.messages import AccountState, Contract, Grant


class Hold:
    """One open request: what is set aside for it and what it was charged, so that it can be corrected or undone.

    Mutable and private to the limiter. `asked` is the output the client asked for, `grant` the answer as last given.
    """

    __slots__ = (
        "account",
        "amount",
        "asked",
        "charged",
        "charged_s",
        "expires_at",
        "grant",
        "holder",
        "output_price",
        "prompt_price",
        "request_drained_at",
        "token_drained_at",
    )

    def __init__(
        self, account: Account, holder: str, amount: int, asked: int, prompt_price: int, output_price: int
    ) -> None:
        self.account = account
        self.holder = holder
        self.amount = amount  # nano-units
        self.asked = asked  # tokens
        self.prompt_price = prompt_price
        self.output_price = output_price
        self.charged = 0  # tokens, and what they were in seconds of the token bucket
        self.charged_s = 0.0
        self.token_drained_at = self.request_drained_at = float("-inf")
        self.expires_at = 0.0
        self.grant: Grant

    def recharge(self, now: float, tokens: int) -> None:
        """Corrects what the token bucket was charged for this request, up into debt or down.

        An increase counts as if it had been known at admission, so the time at which the charge drains moves with it.
        """
        bucket = self.account.tokens
        if tokens > self.charged:
            more_s = bucket.cost_s(tokens - self.charged)
            if more_s < inf:
                bucket.charge(now, more_s)
                self.charged_s += more_s
                self.token_drained_at += more_s
        elif tokens < self.charged:
            less_s = self.charged_s * (self.charged - tokens) / self.charged
            bucket.refund(now, less_s, self.token_drained_at)
            self.charged_s -= less_s
            self.token_drained_at -= less_s
        self.charged = tokens


class Account:
    """An account's committed balance, its open holds, and its rate buckets.

    Why the free balance is never overstated. Every charge is covered by a hold that is at least as large. The ledger
    commits a charge and raises the account's version in one step. A hold is removed only in the step that also brings
    the balance to the version of its settlement or a later one (`close`); a state of an older version is ignored
    (`apply`, `commit`). So at every moment each admitted request is in one of three states: unsettled and held;
    settled, not yet seen, and held; settled and contained in the balance seen here. Its charge is therefore taken
    from `free` at least once: `free <= committed balance - charges still to come`. Deposits and settlements not yet
    seen only make `free` too small. What this does not cover: an operator lowering a balance is seen when the state
    arrives, not before; and a hold whose lease has run out is no longer held, so a dead gateway's request must be
    settled, or known never to be, within the lease.
    """

    __slots__ = (
        "account_id",
        "active",
        "balance",
        "contract",
        "held",
        "holds",
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
        self.held = 0
        self.holds: dict[str, Hold] = {}
        self.keys: set[str] = set()
        self.mean_output: float | None = None  # tokens a reply, moving average; None before the first
        self.own: AccountState | None = None  # as last applied: which limits are the account's own
        self.contract = contract
        self.requests = Bucket(contract.rpm)
        self.tokens = Bucket(contract.tpm)

    def apply(self, state: AccountState, default: Contract) -> bool:
        """Takes over a committed state; False and no change when it is older than what is known."""
        if state.version < self.version or (state.version == self.version and self.balance is not None):
            return False
        self.version = state.version
        self.balance = state.balance
        self.active = state.active
        self.own = state
        self.limit(default)
        return True

    def limit(self, default: Contract) -> None:
        """Sets the limits: the account's own, and the default's where it has none. What is in use stays in use."""
        own = self.own
        self.contract = Contract(
            rpm=default.rpm if own is None or own.rpm is None else own.rpm,
            tpm=default.tpm if own is None or own.tpm is None else own.tpm,
            concurrency=default.concurrency if own is None or own.concurrency is None else own.concurrency,
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
        """Nano-units that nothing has a claim on; negative when an operator took away what was already held."""
        return (self.balance or 0) - self.held

    def open(self, request_id: str, hold: Hold) -> None:
        """Sets the hold's amount aside and takes a concurrency slot."""
        self.holds[request_id] = hold
        self.held += hold.amount

    def resize(self, hold: Hold, amount: int) -> None:
        """Changes what an open hold sets aside."""
        self.held += amount - hold.amount
        hold.amount = amount

    def close(self, request_id: str) -> Hold:
        """Frees the hold and its slot. Raises KeyError when it is not open."""
        hold = self.holds.pop(request_id)
        self.held -= hold.amount
        return hold


class Leases:
    """Open holds by request, oldest lease first.

    All leases are equally long, so a dict in the order of the last renewal is in the order of expiry, and looking for
    the expired ones costs only as much as there are.
    """

    __slots__ = ("_holds", "lease_s")

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._holds: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def get(self, request_id: str) -> Hold | None:
        """The open hold, or None."""
        return self._holds.get(request_id)

    def start(self, request_id: str, hold: Hold, now: float) -> None:
        """Begins or renews a lease."""
        self._holds.pop(request_id, None)
        hold.expires_at = now + self.lease_s
        self._holds[request_id] = hold

    def renew(self, holder: str, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Renews those of the holder that are open; answers those that are not."""
        unknown = []
        for request_id in request_ids:
            hold = self._holds.get(request_id)
            if hold is None or hold.holder != holder:
                unknown.append(request_id)
            else:
                self.start(request_id, hold, now)
        return tuple(unknown)

    def end(self, request_id: str) -> Hold | None:
        """Removes a lease; None when there is none."""
        return self._holds.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Requests whose lease has run out."""
        found = []
        for request_id, hold in self._holds.items():
            if hold.expires_at > now:
                break
            found.append(request_id)
        return found
