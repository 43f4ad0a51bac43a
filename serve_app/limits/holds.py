"""Open requests: what each has set aside and was charged, so that it can be corrected or undone."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from serve_app.limits.gcra import Bucket
from serve_app.limits.messages import Grant

if TYPE_CHECKING:
    from serve_app.limits.accounts import Account
    from serve_app.limits.keys import Key
    from serve_app.limits.share import ShareCharge


class Charge:
    """What one bucket was charged for one request. Undoing it gives back exactly that, also at another limit."""

    __slots__ = ("bucket", "cost_s", "drained_at", "units")

    def __init__(self, bucket: Bucket, now: float, units: int) -> None:
        self.bucket = bucket
        self.units = units
        self.cost_s, self.drained_at = bucket.take(now, units)

    def correct(self, now: float, units: int) -> None:
        """Changes the charge to `units`, up into debt or down.

        An increase counts as if it had been known at the start, so the time at which the charge drains moves with it.
        """
        bucket = self.bucket
        if units > self.units:
            more_s = bucket.cost_s(units - self.units)
            if more_s < inf:
                bucket.charge(now, more_s)
                self.cost_s += more_s
                self.drained_at += more_s
        elif units < self.units:
            less_s = self.cost_s * (self.units - units) / self.units
            bucket.refund(now, less_s, self.drained_at)
            self.cost_s -= less_s
            self.drained_at -= less_s
        self.units = units


class Hold:
    """One open request. Mutable and private to the limiter."""

    __slots__ = (
        "account",
        "amount",
        "asked",
        "backend",
        "expires_at",
        "grant",
        "holder",
        "idempotency_key",
        "key",
        "key_requests",
        "key_tokens",
        "let_in_at",
        "opened_at",
        "output_price",
        "prompt_price",
        "requests",
        "share",
        "tokens",
    )

    def __init__(
        self,
        key: Key,
        holder: str,
        amount: int,
        asked: int,
        prompt_price: int,
        output_price: int,
        opened_at: float,
        backend: str,
        idempotency_key: str | None,
    ) -> None:
        self.key = key
        self.account: Account = key.account
        self.holder = holder
        self.amount = amount  # nano-units
        self.asked = asked  # tokens of output that the client asked for
        self.prompt_price = prompt_price
        self.output_price = output_price
        self.opened_at = opened_at  # Unix time
        self.backend = backend
        self.idempotency_key = idempotency_key
        self.tokens: Charge
        self.requests: Charge | None = None  # None: charged before this limiter started
        self.key_tokens: Charge | None = None
        self.key_requests: Charge | None = None
        self.share: ShareCharge | None = None  # None: the backend was not under pressure
        self.let_in_at = -inf  # on the limiter's clock; -inf: before this limiter started
        self.expires_at = 0.0  # of the lease, on the limiter's clock
        self.grant: Grant  # the answer as last given

    def charge_tokens(self, now: float, tokens: int) -> None:
        """Charges the tokens for the first time; the key's too, where it has a limit of its own."""
        self.tokens = Charge(self.account.tokens, now, tokens)
        if self.key.tokens is not None:
            self.key_tokens = Charge(self.key.tokens, now, tokens)

    def charge_request(self, now: float) -> None:
        """Charges one request; the key's bucket too, where it has a limit of its own."""
        self.requests = Charge(self.account.requests, now, 1)
        if self.key.requests is not None:
            self.key_requests = Charge(self.key.requests, now, 1)

    def recharge(self, now: float, tokens: int) -> None:
        """Corrects what was charged for tokens."""
        self.tokens.correct(now, tokens)
        if self.key_tokens is not None:
            self.key_tokens.correct(now, tokens)
        if self.share is not None:
            self.share.correct(now, tokens, self.account.contract)

    def uncharge(self, now: float) -> None:
        """Gives back all that was charged and has not drained by itself."""
        self.recharge(now, 0)
        if self.requests is not None:
            self.requests.correct(now, 0)
        if self.key_requests is not None:
            self.key_requests.correct(now, 0)
