"""Tracks open requests: the amount that each holds, its charges, and the lease under which it stays open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from serve_app.contracts.limiting import Admit, Grant, OpenHold
from serve_app.contracts.rates import Bucket

if TYPE_CHECKING:
    from serve_app.limiter.accounts import Key
    from serve_app.limiter.shares import ShareCharge


class Charge:
    """The charge of one request on one bucket. It keeps its cost for a refund, because the limit may change."""

    __slots__ = ("bucket", "cost_s", "drained_at", "units")

    def __init__(self, bucket: Bucket, now: float, units: int) -> None:
        self.bucket = bucket
        self.units = units
        self.cost_s, self.drained_at = bucket.charge(now, units)

    def recharge(self, now: float, units: int) -> None:
        """Changes the charge to `units`, up (even into debt) or down.

        An increase counts as if it had been known at the start: the charge drains later.
        """
        if units > self.units:
            more_s, _ = self.bucket.charge(now, units - self.units)
            self.cost_s += more_s
            self.drained_at += more_s
        elif units < self.units:
            less_s = self.cost_s * (self.units - units) / self.units
            self.bucket.refund(now, less_s, self.drained_at)
            self.cost_s -= less_s
            self.drained_at -= less_s
        self.units = units


@dataclass(slots=True, eq=False, repr=False)
class Hold:
    """One open request. Mutable and private to the limiter."""

    request_id: str
    key: Key
    terms: Admit | OpenHold  # prices, requested output, backend and idempotency key
    holder: str
    amount: int  # nano-units
    opened_at: float  # Unix time
    admitted_at: float = -inf  # on the limiter's clock; -inf: before this limiter started
    tokens_charged: int = 0
    requests: Sequence[Charge] = ()  # charges to request buckets; empty if admitted before this limiter started
    tokens: list[Charge] = field(init=False)
    share: ShareCharge | None = None  # None: the backend was not under pressure
    expires_at: float = 0.0  # end of the lease, on the limiter's clock
    grant: Grant = field(init=False)  # the last answer

    def announced(self) -> OpenHold:
        """Returns the hold as its gateway would announce it."""
        terms = self.terms
        return OpenHold(
            self.request_id, self.key.account.account_id, self.key.key_id, self.amount, self.tokens_charged,
            terms.prompt_price, terms.output_price, self.grant.max_tokens, terms.backend, terms.idempotency_key,
            self.opened_at,
        )  # fmt: skip

    def charge_tokens(self, now: float, tokens: int) -> None:
        """Charges the tokens for the first time to each bucket of the key that counts tokens."""
        self.tokens_charged = tokens
        self.tokens = [Charge(bucket, now, tokens) for bucket in self.key.tokens]

    def recharge_tokens(self, now: float, tokens: int) -> None:
        """Changes the charges for tokens to `tokens`."""
        self.tokens_charged = tokens
        for charge in self.tokens:
            charge.recharge(now, tokens)
        if self.share is not None:
            self.share.recharge(now, tokens, self.key.account.contract)

    def uncharge(self, now: float) -> None:
        """Refunds all charges, except for the parts that have already drained."""
        self.recharge_tokens(now, 0)
        for charge in self.requests:
            charge.recharge(now, 0)


class OpenHolds:
    """Open holds by request, the oldest lease first. A hold whose lease is not renewed in time expires.

    All leases have the same length. So a dict in the order of the last renewal is also in the order of expiry. Finding
    the expired holds takes time in proportion to their number.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._holds: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def get(self, request_id: str) -> Hold | None:
        return self._holds.get(request_id)

    def lease(self, hold: Hold, now: float) -> None:
        """Starts or renews the lease of a hold."""
        self._holds.pop(hold.request_id, None)
        hold.expires_at = now + self.lease_s
        self._holds[hold.request_id] = hold

    def renew(self, holder: str, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Renews the holds that are open and belong to the holder. Returns the other requests."""
        unknown = []
        for request_id in request_ids:
            hold = self._holds.get(request_id)
            if hold is None or hold.holder != holder:
                unknown.append(request_id)
            else:
                self.lease(hold, now)
        return tuple(unknown)

    def remove(self, hold: Hold) -> None:
        """Ends the lease of an open hold."""
        del self._holds[hold.request_id]

    def expired(self, now: float) -> list[Hold]:
        """Returns the holds whose lease has expired, oldest first."""
        expired = []
        for hold in self._holds.values():
            if hold.expires_at > now:
                break
            expired.append(hold)
        return expired
