"""The ledger as the limiter sees it: balances, grants, keys and what they have spent, with versions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.periods import period_at
from tests.limiter.world import account_snapshot


@dataclass
class Books:
    """One account `a`. Money that a request costs comes from grants, the soonest expiring first, then from top-ups."""

    topped_up: int
    keys: dict[str, KeySnapshot]
    lots: list[tuple[float, int]] = field(default_factory=list)  # (expires at, left), soonest first
    version: int = 1  # of the account
    changes: int = 1  # the counter that gives every version
    spent: dict[tuple[str, str], int] = field(default_factory=dict)  # by key and period
    owed: int = 0  # charges above the balance: the limiter has admitted too much

    def next_version(self) -> int:
        self.changes += 1
        return self.changes

    @property
    def balance(self) -> int:
        return self.topped_up + sum(left for _, left in self.lots)

    def top_up(self, amount: int) -> None:
        self.topped_up += amount
        self.version = self.next_version()

    def grant(self, amount: int, expires_at: float) -> None:
        self.lots = sorted([*self.lots, (expires_at, amount)])
        self.version = self.next_version()

    def expire(self, before: float) -> None:
        """Removes the lots that expired before `before`."""
        lots = [lot for lot in self.lots if lot[0] > before]
        if lots != self.lots:
            self.lots = lots
            self.version = self.next_version()

    def change_key(self, key_id: str, **terms: object) -> None:
        self.keys[key_id] = replace(self.keys[key_id], version=self.next_version(), **terms)  # type: ignore[arg-type]

    def account(self) -> AccountSnapshot:
        expiring = tuple(lot for lot in self.lots if lot[1])
        return account_snapshot("a", self.balance, self.version, expiring=expiring)

    def key(self, key_id: str, at: float) -> KeySnapshot:
        """As read at the Unix time `at` of the ledger's clock."""
        state = self.keys[key_id]
        if state.budget_period is None:
            return state
        period = period_at(state.budget_period, at).name
        spent = self.spent.get((key_id, period), 0)
        return replace(state, spent=spent, spent_period=period, spent_version=self.version)

    def charge(self, key_id: str, cost: int, started_at: float, finished_at: float) -> None:
        """Settles a request."""
        self.take(cost, started_at)
        self.version = self.next_version()
        kind = self.keys[key_id].budget_period
        if kind is not None:
            name = key_id, period_at(kind, finished_at).name
            self.spent[name] = self.spent.get(name, 0) + cost
            self.change_key(key_id)

    def take(self, cost: int, started_at: float) -> None:
        lots = []
        for expires_at, left in self.lots:
            taken = min(left, cost) if started_at < expires_at else 0
            cost -= taken
            lots.append((expires_at, left - taken))
        self.lots = lots
        taken = min(self.topped_up, cost)
        self.topped_up -= taken
        self.owed += cost - taken

    def left_after(self, costs: list[tuple[float, int]], at: float) -> int:
        """Returns what a request starting now could spend if those requests, (started at, cost), all cost that much."""
        copy = replace(self, lots=list(self.lots))
        for started_at, cost in sorted(costs):
            copy.take(cost, started_at)
        payable = sum(left for expires_at, left in copy.lots if at < expires_at)
        return copy.topped_up + payable - (copy.owed - self.owed)
