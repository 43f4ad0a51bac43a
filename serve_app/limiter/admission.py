"""Decides which requests may run, by key, balance, budget, concurrency and rates, and corrects the decisions later.

A decision is all or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Final

from serve_app.contracts.addresses import address_in
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import (
    AccountStatus,
    Adjust,
    Admit,
    Grant,
    Heard,
    Identify,
    Identity,
    Live,
    LiveReport,
    OpenHold,
    PressureReport,
    Recovering,
    Refusal,
    Release,
    Renew,
    UnknownKey,
    Window,
)
from serve_app.contracts.limits import Contract
from serve_app.limiter import refusals
from serve_app.limiter.accounts import Key, Registry, tightest
from serve_app.limiter.checks import check_limits, learn_output, output_budget, token_charge
from serve_app.limiter.holds import Charge, Hold, OpenHolds
from serve_app.limiter.live import Gateways, backend_loads, busiest
from serve_app.limiter.pressure import Tuning
from serve_app.limiter.shares import Shares

POSTED: Final = "posted"  # `holder` of holds that are known only from the ledger
AWAIT_LEASE_S: Final = 0.3  # a gateway asks again after this time, if this limiter has no lease


class Admission:
    """Decides on requests. Not thread-safe, does no I/O, and never waits.

    A refused request consumes nothing: every check comes before the first change. The order of the checks is 401 (key,
    account), 403 (address), 422 (model), 409 (idempotency key), 402 (balance, then the key's budget), 429 (concurrency,
    requests, tokens; account and key each), 429 (the account's share of a backend under pressure), 503 (no capacity).

    `clock` returns seconds of a clock that never runs backwards. `wall` returns Unix time, by which keys and grants
    expire and budgets renew. `rng` adds jitter to waits. A hold expires after `lease_s` unless it is renewed.

    For the first `recovery_s` after the start, `admit` returns `Recovering`. Meanwhile gateways announce the holds that
    this limiter does not know. `recovery_s` must be longer than the interval of the gateways' heartbeats, or 0 where no
    gateway can have open requests. From `admits_until` on, `admit` and `adjust` return `Recovering` as well, because
    the lease is over.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: Random,
        default_contract: Contract,
        lease_s: float = 10.0,
        recovery_s: float = 3.0,
        wall: Callable[[], float] = time.time,
        tuning: Tuning | None = None,
    ) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._wall = wall
        self._rng = rng
        self.shares = Shares(tuning or Tuning(), default_contract)
        self._registry = Registry(default_contract)
        self._accounts = self._registry.accounts
        self._keys = self._registry.keys
        self._open_holds = OpenHolds(lease_s)
        self._gateways = Gateways(clock, lease_s)
        self._recovery_s = recovery_s
        self.epoch = 0  # epoch of the lease that this limiter holds, if it needs one
        self.admits_until = inf  # time on `clock` at which this limiter stops admitting
        self._posted: set[str] = set()  # requests of holds that are known from the ledger
        self.recover()

    @property
    def admits(self) -> bool:
        """Whether this limiter may decide."""
        return self._clock() < self.admits_until

    def held(self) -> tuple[int, int]:
        """Returns the number of requests that have a hold, and the sum of their holds in nano-units."""
        return len(self._open_holds), sum(hold.amount for hold in self._open_holds)

    def recover(self) -> None:
        """Starts a new recovery: for `recovery_s`, gateways announce the holds that this limiter does not know."""
        self.recovering_until = self._clock() + self._recovery_s

    def reconfigure(self, default: Contract, tuning: Tuning) -> None:
        """Sets the default limits of accounts, and the tuning of the response to pressure."""
        self._registry.set_default(default)
        self.shares.reconfigure(tuning, default)

    def knows(self, key_digest: str) -> bool:
        """Returns whether the key and its account need no look-up."""
        key = self._keys.get(key_digest)
        return key is not None and key.is_known

    def knows_account(self, account_id: str) -> bool:
        """Returns whether the account is known here. If it is, changes to it and to its keys must be applied."""
        return account_id in self._accounts

    def identify(self, ask: Identify) -> Identity | Refusal | UnknownKey:
        """Returns the owner of an active key of an active account, or a refusal (401 or 403). Admits nothing."""
        key = self._authenticate("", ask.key_digest, ask.address)
        if not isinstance(key, Key):
            return key
        models = None if key.snapshot is None else key.snapshot.models
        return Identity(key.account.account_id, key.key_id, key.networks is None, models)

    def admit(self, ask: Admit) -> Grant | Refusal | UnknownKey | Recovering:
        """Admits a request, or returns the reason why not. For an open request it returns the same grant again."""
        request_id = ask.request_id
        now = self._clock()
        if now >= self.admits_until:
            return Recovering(request_id, AWAIT_LEASE_S)
        known = self._open_holds.get(request_id)
        if known is not None:
            if known.grant.epoch != self.epoch:
                known.grant = replace(known.grant, epoch=self.epoch)
            return known.grant
        if now < self.recovering_until:
            return Recovering(request_id, self.recovering_until - now)
        key = self._authenticate(request_id, ask.key_digest, ask.address)
        if not isinstance(key, Key):
            return key
        at = self._wall()
        account = key.account
        offer = check_limits(ask, key, now, at, self._rng)
        if isinstance(offer, Refusal):
            return _of_key(offer, key)
        if isinstance(offer, Recovering):
            return offer
        verdict = self.shares.check_share(ask.backend, account.account_id, account.contract, now)
        if verdict is not None:
            size = ask.prompt_tokens, ask.max_tokens
            self.shares.count_refused(ask.backend, account.account_id, account.contract, size, offer.charge, now)
            tokens = self._tokens(key, ask.backend, now)
            refusal = refusals.under_pressure(request_id, key, verdict, tokens, now, self._rng)
            return _of_key(refusal, key)

        hold = Hold(request_id, key, ask, ask.holder, offer.hold, opened_at=at, admitted_at=now)
        hold.requests = [Charge(bucket, now, 1) for bucket in key.requests]
        hold.charge_tokens(now, offer.charge)
        hold.share = self.shares.charge_share(ask.backend, account.account_id, account.contract, offer.charge, now)
        return self._open(hold, offer.max_tokens, now, offer.tentative)

    def adjust(self, ask: Adjust) -> Grant | Refusal | UnknownKey | Recovering:
        """Replaces the estimated prompt tokens with the counted ones. Corrects the hold, output budget and buckets.

        If the prompt and one token of output cost too much, returns 402 and undoes the admission. A request that is not
        open here gets 503, or `Recovering` while it may still be announced. Returns UnknownKey for an announced request
        until its account and key are known, because their balance and budget are needed.
        """
        now = self._clock()
        if now >= self.admits_until:
            return Recovering(ask.request_id, AWAIT_LEASE_S)
        hold = self._open_holds.get(ask.request_id)
        if hold is None:
            if now < self.recovering_until:
                return Recovering(ask.request_id, self.recovering_until - now)
            return refusals.lost(ask.request_id, self._rng)
        key, terms = hold.key, hold.terms
        account = key.account
        at = self._wall()
        if not key.is_known:
            return UnknownKey(ask.request_id, ask.key_digest)
        assert key.snapshot is not None
        available, of_budget = max(0, account.spendable(hold.opened_at) + hold.amount), False
        if key.snapshot.budget is not None:
            if unsure_s := key.unsure_s(at):
                return Recovering(ask.request_id, unsure_s)
            left = max(0, key.left(at) + hold.amount)
            if left < available:
                available, of_budget = left, True
        budget = output_budget(available, ask.prompt_tokens, terms.max_tokens, terms.prompt_price, terms.output_price)
        if budget < 1:
            needed = ask.prompt_tokens * terms.prompt_price + terms.output_price
            refusal = refusals.too_expensive(
                ask.request_id, key, ask.prompt_tokens, needed, available, at, of_budget=of_budget
            )
            self._undo(hold, now)
            return refusal
        account.resize(hold, ask.prompt_tokens * terms.prompt_price + budget * terms.output_price)
        hold.recharge_tokens(now, token_charge(ask.prompt_tokens, budget, key))
        hold.grant = self._grant(hold, budget, now, tentative=False)
        return hold.grant

    def release(self, end: Release) -> None:
        """Ends a request. Harmless to repeat. Applies newer balances and spending even if the hold no longer exists."""
        hold = self._open_holds.get(end.request_id)
        now = self._clock()
        # Freeing the hold and applying the new figures must be one step: Account and Key explain why.
        if hold is None:
            self._update(end, now)
            return
        if end.balance is not None and end.version is not None:
            hold.key.account.update_balance(end.balance, end.version)
            if end.key_spent is not None and end.key_period is not None:
                hold.key.update_spent(end.key_spent, end.key_period, end.version)
        if end.refused and end.keeps_rate:
            self.shares.remove_work(
                hold.terms.backend, hold.key.account.account_id, hold.tokens_charged, hold.admitted_at, now
            )
            hold.recharge_tokens(now, end.prompt_tokens)
            self._close(hold, now)
            return
        if end.refused:
            self._undo(hold, now)
            return
        counted = end.prompt_tokens + end.completion_tokens
        if not counted and isinstance(hold.terms, Admit):
            counted = hold.terms.prompt_tokens  # the request ended before its prompt was counted
        hold.recharge_tokens(now, counted)
        if end.completion_tokens:
            learn_output(hold.key, end.completion_tokens)
        self._close(hold, now)

    def _update(self, end: Release, now: float) -> None:
        """Applies the balance and the key's spending after the hold has been removed.

        Also stores their versions for accounts and keys that are not known here. A look-up that was read before this
        settlement is then recognised as old.
        """
        if end.account_id is None or end.balance is None or end.version is None:
            return
        account = self._registry.account_or_new(end.account_id, now)
        account.update_balance(end.balance, end.version)
        self._registry.touch(account, now)
        if end.key_id is not None and end.key_spent is not None and end.key_period is not None:
            key = self._registry.key_or_new(account, end.key_id, now)
            key.update_spent(end.key_spent, end.key_period, end.version)
            self._registry.touch(key, now)

    def renew(self, beat: Renew) -> tuple[str, ...]:
        """Renews the leases of a gateway's holds. Returns the requests that the gateway must announce again."""
        self._gateways.heard(beat)
        return self._open_holds.renew(beat.holder, beat.request_ids, self._clock())

    def announce(self, open_hold: OpenHold, holder: str) -> None:
        """Adds a hold that was granted before this limiter started, or whose lease has expired.

        The request already runs. So the hold counts at once, even above the limits and before account and key are
        known. If the hold is already open here, only renews its lease and sets its `holder`.
        """
        now = self._clock()
        known = self._open_holds.get(open_hold.request_id)
        if known is not None:
            known.holder = holder
            self._open_holds.lease(known, now)
            return
        account = self._registry.account_or_new(open_hold.account_id, now)
        key = self._registry.key_or_new(account, open_hold.key_id, now)
        opened_at = open_hold.opened_at or self._wall()
        hold = Hold(open_hold.request_id, key, open_hold, holder, open_hold.hold, opened_at)
        hold.charge_tokens(now, open_hold.tokens_charged)
        self._open(hold, open_hold.max_tokens, now, tentative=False)

    def expire(self) -> list[str]:
        """Frees the holds whose lease has expired. Returns their requests.

        Their charges on the token buckets stay until they drain, because it is unknown what the requests used.
        """
        now = self._clock()
        expired = self._open_holds.expired(now)
        lost = [hold for hold in expired if hold.holder != POSTED]
        for hold in expired:
            if hold.holder == POSTED:
                self._open_holds.lease(hold, now)  # the hold stays until it is no longer posted in the ledger
        for hold in lost:
            self._close(hold, now)
        return [hold.request_id for hold in lost]

    def open_holds(self) -> list[tuple[str, OpenHold]]:
        """Returns (gateway, hold) for each open hold, without those known only from the ledger."""
        return [(hold.holder, hold.announced()) for hold in self._open_holds if hold.holder != POSTED]

    def take_posted(self, holds: Sequence[OpenHold]) -> list[str]:
        """Adds all holds posted in the ledger. Returns the requests that are no longer posted, for `drop_posted`.

        If a gateway of this limiter keeps a hold alive, that gateway stays its holder.
        """
        now = self._clock()
        posted = {hold.request_id for hold in holds}
        for hold in holds:
            if self._open_holds.get(hold.request_id) is None:
                self.announce(hold, POSTED)
                self._posted.add(hold.request_id)
        self._open_holds.renew(POSTED, posted, now)
        return [request_id for request_id in self._posted if request_id not in posted]

    def drop_posted(self, request_ids: Iterable[str]) -> None:
        """Frees holds that are no longer posted. Call it when the balances after their settlements are known."""
        for request_id in request_ids:
            self._posted.discard(request_id)
            hold = self._open_holds.get(request_id)
            if hold is not None and hold.holder == POSTED:
                self._close(hold, self._clock())

    def apply(self, snapshot: AccountSnapshot | KeySnapshot) -> None:
        """Applies a committed state. Ignores it if it is older than the known one."""
        self._registry.apply(snapshot, self._clock())

    def report(self, report: PressureReport) -> Heard:
        """Records a replica's load. Returns the number of shards, and the demand refused because of the load."""
        now = self._clock()
        self.shares.report(report, now)
        return Heard(self.shares.shards, self.shares.refused_per_s(report.backend, now))

    def forget_idle(self, idle_s: float, most: int) -> int:
        """Drops keys, and accounts without keys, that have been idle for `idle_s` seconds. Returns the number dropped.

        The next request looks them up again. Keys and accounts stay while they have open holds, or rates that have not
        drained. `idle_s` must be longer than any look-up may take. Call it often, because a call checks at most `most`
        keys and accounts.
        """
        return self._registry.forget_idle(idle_s, most, self._clock())

    def status(self, account_id: str) -> AccountStatus:
        """Returns the account's status. An unknown account holds nothing and has the default limits."""
        account, now = self._accounts.get(account_id), self._clock()
        if account is None:
            contract = self._registry.default
            return AccountStatus(account_id, 0, 0, contract, self.shares.pressed(contract, now))
        pressed = self.shares.pressed(account.contract, now)
        return AccountStatus(account_id, account.held, len(account.holds), account.contract, pressed)

    def live(self, ask: Live) -> LiveReport:
        """Returns the current activity. Takes time in proportion to the number of open requests. Changes nothing."""
        now = self._clock()
        return LiveReport(
            self.admits,
            *self.held(),
            backend_loads(self.shares, now),
            busiest(self._open_holds, self.shares, ask.top, now),
            self._gateways.alive(),
        )

    def _authenticate(self, request_id: str, key_digest: str, address: str) -> Key | Refusal | UnknownKey:
        key = self._keys.get(key_digest)
        if key is None or key.snapshot is None:
            return UnknownKey(request_id, key_digest)
        snapshot, account = key.snapshot, key.account
        if not snapshot.active:
            return refusals.revoked(request_id)
        if snapshot.expires_at is not None and snapshot.expires_at <= self._wall():
            return refusals.key_expired(request_id, snapshot.expires_at)
        if account.snapshot is None:
            return UnknownKey(request_id, key_digest)
        if not account.snapshot.active:
            return refusals.suspended(request_id)
        if key.networks is not None and not key.allows(seen := address_in(address)):
            return refusals.address_not_allowed(request_id, key, seen)
        return key

    def _open(self, hold: Hold, max_tokens: int, now: float, tentative: bool) -> Grant:
        hold.grant = self._grant(hold, max_tokens, now, tentative)
        self._registry.open(hold)
        self._open_holds.lease(hold, now)
        return hold.grant

    def _close(self, hold: Hold, now: float) -> None:
        self._open_holds.remove(hold)
        self._registry.close(hold, now)
        key = hold.key
        if key.snapshot is not None and key.snapshot.budget is not None:
            key.freed(hold.amount, self._wall())

    def _undo(self, hold: Hold, now: float) -> None:
        """Closes a hold as if the request had never been admitted."""
        self.shares.remove_work(
            hold.terms.backend, hold.key.account.account_id, hold.tokens_charged, hold.admitted_at, now
        )
        hold.uncharge(now)
        self._close(hold, now)

    def _grant(self, hold: Hold, max_tokens: int, now: float, tentative: bool) -> Grant:
        key = hold.key
        return Grant(
            hold.request_id,
            key.account.account_id,
            key.key_id,
            hold.amount,
            max_tokens,
            tightest(key.requests, now),
            self._tokens(key, hold.terms.backend, now),
            hold.tokens_charged,
            tentative,
            key.account.contract.weight,
            self.epoch,
            key.networks is None,
        )

    def _tokens(self, key: Key, backend: str, now: float) -> Window:
        """Returns the tokens per minute for the headers: the contract's limit, or the lower one under pressure."""
        account = key.account
        return self.shares.window(backend, account.account_id, account.contract, tightest(key.tokens, now), now)


def _of_key(refusal: Refusal, key: Key) -> Refusal:
    return replace(refusal, account_id=key.account.account_id, key_id=key.key_id, from_anywhere=key.networks is None)
