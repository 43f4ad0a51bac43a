"""An API key's own limits, which apply on top of its account's, and what is set aside from its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_app.limits.gcra import Bucket
from serve_app.limits.holds import Charge
from serve_app.limits.messages import KeyState
from serve_app.limits.periods import CLOCK_SKEW_S, Period, period_at

if TYPE_CHECKING:
    from serve_app.limits.accounts import Account


class Key:
    """A key as last applied, its open requests, and its rate buckets where it has limits of its own.

    Why a budget is never overspent. As with balances (see Account): a hold is removed only in the step that brings
    what the key has spent, as of its settlement or later, and anything older is ignored, so each charge is taken from
    `left` at least once. A charge counts in the period in which its request ends, and requests run past the end of
    one: so the holds of all open requests are taken from the budget of whichever period it is, and a charge finds
    room in the next period as well as in the one in which it was admitted.

    Clocks differ by up to CLOCK_SKEW_S. A period lasts that much longer here, while a gateway may still let a request
    end in it; what the ledger says was spent in the next one counts already. It no longer tells of the one that ends
    here: what was told last goes on counting, and every hold that is removed is taken to have been spent (`freed`).
    Where nothing was told, it is not known what is left until the period has ended here, too (`unsure_s`).
    """

    __slots__ = (
        "_ending",
        "_period",
        "account",
        "held",
        "key_id",
        "mean_output",
        "open",
        "requests",
        "spent",
        "spent_period",
        "spent_version",
        "state",
        "tokens",
    )

    def __init__(self, account: Account, key_id: str) -> None:
        self.account = account
        self.key_id = key_id
        self.state: KeyState | None = None  # None until the ledger has told; holds count all the same
        self.held = 0  # nano-units
        self.open = 0  # requests
        self.requests: Bucket | None = None  # None: no limit of its own
        self.tokens: Bucket | None = None
        self.mean_output: float | None = None  # as Account's, kept only with a token limit of its own
        self.spent = 0  # nano-units in `spent_period`, as of the account's version `spent_version`
        self.spent_period = ""
        self.spent_version = -1
        self._ending = (0, "")  # what was spent in the period that was told of before that
        self._period: Period | None = None  # the last one asked for

    def apply(self, state: KeyState, now: float) -> bool:
        """Takes over a committed state; False and no change unless it is newer than what is known.

        `spent` has a version of its own, because a settlement may have told of a newer one.
        """
        if self.state is not None and state.version <= self.state.version:
            return False
        self.state = state
        self.requests = _limited(self.requests, state.rpm)
        meter_open = self.tokens is None
        self.tokens = _limited(self.tokens, state.tpm)
        if meter_open and self.tokens is not None:
            # Requests that were open before the limit was known: those of before a restart, above all.
            for hold in self.account.holds.values():
                if hold.key is self:
                    hold.key_tokens = Charge(self.tokens, now, hold.tokens.units)
        if state.spent_version >= self.spent_version:
            self._spend(state.spent, state.spent_period, state.spent_version)
        self._period = None
        return True

    def commit(self, spent: int, period: str, version: int) -> None:
        """Takes over what a settlement says the key has spent, unless something newer is known."""
        if version > self.spent_version:
            self._spend(spent, period, version)

    def _spend(self, spent: int, period: str, version: int) -> None:
        if period != self.spent_period:
            self._ending = self.spent, self.spent_period
        self.spent, self.spent_period, self.spent_version = spent, period, version

    def period(self, at: float) -> Period:
        """The period of the budget at the Unix time `at`, on a clock that is late by what clocks may differ."""
        state = self.state
        assert state is not None
        at -= CLOCK_SKEW_S
        period = self._period
        if period is None or not period.begins <= at < period.ends:
            period = self._period = period_at(state.budget_period or "month", at)
        return period

    def left(self, at: float) -> int:
        """Nano-units of the budget that nothing has a claim on at the Unix time `at`; can be negative.

        Only for a key with a budget.
        """
        state = self.state
        assert state is not None
        assert state.budget is not None
        name = self.period(at).name
        told = (self.spent, self.spent_period), self._ending
        return state.budget - self.held - max((spent for spent, period in told if period >= name), default=0)

    def unsure_s(self, at: float) -> float:
        """Seconds from the Unix time `at` for which it is not known what was spent in the period; mostly 0."""
        period = self.period(at)
        if self.spent_period <= period.name or self._ending[1] == period.name:
            return 0.0
        left_s = period.ends - (at - CLOCK_SKEW_S)
        # A ledger that is further ahead than clocks may differ is believed: it would be so for hours.
        return left_s if left_s <= 2 * CLOCK_SKEW_S else 0.0

    def freed(self, amount: int, at: float) -> None:
        """A hold was removed, at the Unix time `at`: where nobody tells what was charged for it, all of it was."""
        name = self.period(at).name
        if self.spent_period > name == self._ending[1]:
            self._ending = self._ending[0] + amount, name

    def is_settled(self, now: float) -> bool:
        """Whether nothing of it counts any more: no request is open, and its rates have drained."""
        return not self.open and all(
            bucket is None or not bucket.reset_s(now) for bucket in (self.requests, self.tokens)
        )


def _limited(bucket: Bucket | None, limit: int | None) -> Bucket | None:
    """The bucket at this limit, with what is in use; a full one where there was none."""
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit)
    bucket.limit = limit
    return bucket
