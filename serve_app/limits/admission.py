"""Who may run: one decision over key, balance, budget, concurrency and rates, all or nothing, and its corrections."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random

from serve_app.limits import refusals
from serve_app.limits.charges import learn_output, output_budget, token_charge
from serve_app.limits.checks import check
from serve_app.limits.holds import Hold
from serve_app.limits.keys import Key
from serve_app.limits.leases import Leases
from serve_app.limits.messages import (
    AccountState,
    Adjust,
    Admit,
    Contract,
    Grant,
    Identify,
    Identity,
    KeyState,
    OpenHold,
    PressureReport,
    Recovering,
    Refusal,
    Release,
    Renew,
    UnknownKey,
    Window,
)
from serve_app.limits.pressure import Tuning
from serve_app.limits.registry import Registry
from serve_app.limits.share import Shares
from serve_app.limits.stats import Stats


class Admission:
    """Decides over requests. Not thread-safe, does no I/O, and never waits.

    A refused request consumes nothing at all: every check comes before the first change. The order of the checks is
    401 (key, account), 422 (model), 409 (idempotency key), 402 (balance, then the key's budget), 429 (concurrency,
    requests, tokens; account and key each), 429 (the account's share of a backend under pressure), 503 (no capacity).

    `clock` answers seconds of a clock that never runs backwards, `wall` Unix time, by which keys and grants expire and
    budgets renew; `rng` spreads the times to wait. A hold lives for `lease_s` unless it is renewed. For the first
    `recovery_s` after the start, `admit` answers `Recovering`, so that gateways announce the holds that this limiter
    does not know; take it longer than the gateways' heartbeat, or 0 where no gateway can have open requests.
    `shares` divides what replicas can do; by default one shard's with the usual tuning.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: Random,
        default_contract: Contract,
        lease_s: float = 10.0,
        recovery_s: float = 3.0,
        wall: Callable[[], float] = time.time,
        shares: Shares | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._rng = rng
        self.shares = shares or Shares(Tuning(), default_contract)
        self._registry = Registry(default_contract)
        self._accounts = self._registry.accounts
        self._keys = self._registry.keys
        self._leases = Leases(lease_s)
        self._recovering_until = clock() + recovery_s
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    @property
    def lease_s(self) -> float:
        """How long a hold lives unless it is renewed, in seconds."""
        return self._leases.lease_s

    @property
    def recovering_until(self) -> float:
        """The clock's time up to which `admit` answers `Recovering`."""
        return self._recovering_until

    @property
    def default_contract(self) -> Contract:
        """The limits of accounts that have none of their own; may be set at any time."""
        return self._registry.default

    @default_contract.setter
    def default_contract(self, contract: Contract) -> None:
        self._registry.default = contract
        self.shares.set_default(contract)

    def knows(self, key_digest: str) -> bool:
        """Whether the key and its account need no look-up."""
        key = self._keys.get(key_digest)
        if key is None or key.state is None:
            return False
        return not key.state.active or key.account.balance is not None

    def knows_account(self, account_id: str) -> bool:
        """Whether anything is known of the account, so that its changes and those of its keys must be applied."""
        return account_id in self._accounts

    def identify(self, ask: Identify) -> Identity | Refusal | UnknownKey:
        """Whose key it is, without admitting anything: an active key of an active account, or 401."""
        key = self._authenticate("", ask.key_digest)
        return Identity(key.account.account_id, key.key_id) if isinstance(key, Key) else key

    def admit(self, ask: Admit) -> Grant | Refusal | UnknownKey | Recovering:
        """Lets one request in, or says why not. Asked again for an open request, it answers the same grant."""
        request_id = ask.request_id
        known = self._leases.get(request_id)
        if known is not None:
            return known.grant
        now = self._clock()
        if now < self._recovering_until:
            return Recovering(request_id, self._recovering_until - now)
        key = self._authenticate(request_id, ask.key_digest)
        if not isinstance(key, Key):
            return key
        at = self._wall()
        offer = check(ask, key, now, at, self._rng)
        if isinstance(offer, Refusal):
            return self._refuse(offer)
        if isinstance(offer, Recovering):
            return offer
        account = key.account
        verdict = self.shares.check(ask.backend, account.account_id, account.contract, now)
        if verdict is not None:
            tokens = self._tokens(key, ask.backend, now)
            return self._refuse(refusals.under_pressure(request_id, key, verdict, tokens, now, self._rng))

        hold = Hold(
            key,
            ask.holder,
            offer.hold,
            ask.max_tokens,
            ask.prompt_price,
            ask.output_price,
            at,
            ask.backend,
            ask.idempotency_key,
        )
        hold.charge_request(now)
        hold.charge_tokens(now, offer.charge)
        hold.share = self.shares.charge(ask.backend, account.account_id, account.contract, offer.charge, now)
        hold.let_in_at = now
        hold.grant = self._grant(request_id, hold, offer.max_tokens, now, offer.tentative)
        self._open(request_id, hold, now)
        self._counts["admitted"] += 1
        return hold.grant

    def adjust(self, ask: Adjust) -> Grant | Refusal | Recovering:
        """Replaces the estimated prompt by the counted one: new hold, new output budget, corrected token buckets.

        When the prompt and one token of output cannot be paid, answers 402 and undoes the admission as if it had
        never been. A request that is not open here gets 503, or `Recovering` while it may still be announced.
        """
        hold = self._leases.get(ask.request_id)
        now = self._clock()
        if hold is None:
            if now < self._recovering_until:
                return Recovering(ask.request_id, self._recovering_until - now)
            return self._refuse(refusals.lost(ask.request_id, self._rng))
        account, key = hold.account, hold.key
        at = self._wall()
        # After a restart the ledger may not have told yet: then the hold as announced is all there is to spend.
        available, of_budget = hold.amount, False
        if account.balance is not None and key.state is not None:
            available = max(0, account.spendable(hold.opened_at) + hold.amount)
            if key.state.budget is not None:
                left = hold.amount if key.unsure_s(at) else max(0, key.left(at) + hold.amount)
                if left < available:
                    available, of_budget = left, True
        budget = output_budget(available, ask.prompt_tokens, hold.asked, hold.prompt_price, hold.output_price)
        if budget < 1:
            needed = ask.prompt_tokens * hold.prompt_price + hold.output_price
            costs = ask.request_id, key, ask.prompt_tokens, needed, available
            refusal = refusals.over_budget(*costs, at) if of_budget else refusals.too_expensive(*costs)
            self._undo(ask.request_id, hold, now)
            return self._refuse(refusal)
        account.resize(hold, ask.prompt_tokens * hold.prompt_price + budget * hold.output_price)
        hold.recharge(now, token_charge(ask.prompt_tokens, budget, key))
        hold.grant = self._grant(ask.request_id, hold, budget, now, tentative=False)
        return hold.grant

    def release(self, end: Release) -> None:
        """Ends a request. Repeating it is harmless; newer figures are taken over even if the hold is gone."""
        hold = self._leases.get(end.request_id)
        now = self._clock()
        # Figures are taken over in the step that frees the hold: see Account and Key on why what is free stays true.
        if hold is None:
            self._commit(end, now)
            return
        if end.balance is not None and end.version is not None:
            hold.account.commit(end.balance, end.version)
            if end.key_spent is not None and end.key_period is not None:
                hold.key.commit(end.key_spent, end.key_period, end.version)
        if end.refused:
            self._undo(end.request_id, hold, now)
            return
        hold.recharge(now, end.prompt_tokens + end.completion_tokens)
        if end.completion_tokens:
            learn_output(hold.key, end.completion_tokens)
        self._close(end.request_id, hold, now)
        self._counts["released"] += 1

    def _commit(self, end: Release, now: float) -> None:
        """Takes over the balance and what the key has spent although the hold is gone.

        Also of what is not known here, so that a look-up which was read before this settlement is recognised as old.
        """
        if end.account_id is None or end.balance is None or end.version is None:
            return
        account = self._registry.account(end.account_id, now)
        account.commit(end.balance, end.version)
        self._registry.heard_of(account, now)
        if end.key_id is not None and end.key_spent is not None and end.key_period is not None:
            key = self._registry.key(account, end.key_id, now)
            key.commit(end.key_spent, end.key_period, end.version)
            self._registry.heard_of(key, now)

    def renew(self, beat: Renew) -> tuple[str, ...]:
        """Renews leases; answers the requests that are not open here, which the gateway announces again."""
        return self._leases.renew(beat.holder, beat.request_ids, self._clock())

    def announce(self, open_hold: OpenHold, holder: str) -> None:
        """Takes in a hold that was granted before this limiter started or whose lease had run out.

        It counts at once, also while account and key are not known yet, and whatever the limits say: the request is
        already running. A hold that is open here only has its lease renewed and moved to `holder`.
        """
        request_id = open_hold.request_id
        now = self._clock()
        known = self._leases.get(request_id)
        if known is not None:
            known.holder = holder
            self._leases.start(request_id, known, now)
            return
        account = self._registry.account(open_hold.account_id, now)
        key = self._registry.key(account, open_hold.key_id, now)
        hold = Hold(
            key,
            holder,
            open_hold.hold,
            open_hold.max_tokens,
            open_hold.prompt_price,
            open_hold.output_price,
            self._wall(),  # later than it was, so no grant is taken to pay for it that may have expired before
            open_hold.backend,
            open_hold.idempotency_key,
        )
        hold.charge_tokens(now, open_hold.tokens_charged)
        hold.grant = self._grant(request_id, hold, open_hold.max_tokens, now, tentative=False)
        self._open(request_id, hold, now)
        self._counts["announced"] += 1

    def expire(self) -> list[str]:
        """Frees the holds whose lease has run out and answers their requests.

        What the requests used is not known, so their charge on the token bucket stays until it drains.
        """
        now = self._clock()
        gone = self._leases.expired(now)
        for request_id in gone:
            hold = self._leases.get(request_id)
            assert hold is not None
            self._close(request_id, hold, now)
        self._counts["expired"] += len(gone)
        return gone

    def apply(self, state: AccountState | KeyState) -> None:
        """Takes over what the ledger committed; anything older than what is known is ignored."""
        self._registry.apply(state, self._clock())

    def report(self, report: PressureReport) -> None:
        """Takes in what a replica says about its pressure."""
        self.shares.report(report, self._clock())

    def forget_idle(self, idle_s: float, most: int) -> int:
        """Drops keys, and accounts without keys, that have been idle for so long; the next request looks them up again.

        What still counts stays: open holds, and rates that have not drained. Take `idle_s` longer than any look-up may
        take, and call it often: it looks at no more than `most` keys and accounts, and answers how many it dropped.
        """
        forgotten = self._registry.forget_idle(idle_s, most, self._clock())
        self._counts["forgotten"] += forgotten
        return forgotten

    def held(self, account_id: str) -> int:
        """Nano-units set aside for the account's open requests; 0 for an unknown account."""
        account = self._accounts.get(account_id)
        return account.held if account is not None else 0

    def open_requests(self, account_id: str) -> int:
        """Requests of the account that hold a slot; 0 for an unknown account."""
        account = self._accounts.get(account_id)
        return len(account.holds) if account is not None else 0

    def effective(self, account_id: str) -> Contract:
        """The limits that apply to the account now; the default contract for an unknown account."""
        account = self._accounts.get(account_id)
        return account.contract if account is not None else self._registry.default

    def pressed(self, account_id: str) -> tuple[tuple[str, int], ...]:
        """Backends that leave the account less than its contract now, and how many tokens per minute that is."""
        contract, now = self.effective(account_id), self._clock()
        left = ((load.backend, self.shares.rate(load.backend, contract, now)) for load in self.shares.loads(now))
        return tuple((backend, round(rate * 60.0)) for backend, rate in left if rate < contract.tpm / 60.0)

    def stats(self) -> Stats:
        """Sizes and counts, for metrics."""
        return Stats(
            accounts=len(self._accounts),
            keys=len(self._keys),
            open_holds=len(self._leases),
            held=sum(account.held for account in self._accounts.values()),
            admitted=self._counts["admitted"],
            released=self._counts["released"],
            expired=self._counts["expired"],
            announced=self._counts["announced"],
            forgotten=self._counts["forgotten"],
            refused=dict(self._refused),
        )

    def _authenticate(self, request_id: str, key_digest: str) -> Key | Refusal | UnknownKey:
        key = self._keys.get(key_digest)
        if key is None or key.state is None:
            return UnknownKey(request_id, key_digest)
        state = key.state
        if not state.active:
            return self._refuse(refusals.revoked(request_id))
        if state.expires_at is not None and state.expires_at <= self._wall():
            return self._refuse(refusals.key_expired(request_id, state.expires_at))
        if key.account.balance is None:
            return UnknownKey(request_id, key_digest)
        if not key.account.active:
            return self._refuse(refusals.suspended(request_id))
        return key

    def _open(self, request_id: str, hold: Hold, now: float) -> None:
        self._registry.open(request_id, hold)
        self._leases.start(request_id, hold, now)

    def _close(self, request_id: str, hold: Hold, now: float) -> None:
        self._leases.end(request_id)
        self._registry.close(request_id, hold, now)
        key = hold.key
        if key.state is not None and key.state.budget is not None:
            key.freed(hold.amount, self._wall())

    def _undo(self, request_id: str, hold: Hold, now: float) -> None:
        self.shares.give_back(hold.backend, hold.tokens.units, hold.let_in_at, now)
        hold.uncharge(now)
        self._close(request_id, hold, now)

    def _refuse(self, refusal: Refusal) -> Refusal:
        self._refused[refusal.code] += 1
        return refusal

    def _grant(self, request_id: str, hold: Hold, budget: int, now: float, tentative: bool) -> Grant:
        key = hold.key
        return Grant(
            request_id,
            key.account.account_id,
            key.key_id,
            hold.amount,
            budget,
            refusals.request_window(key, now),
            self._tokens(key, hold.backend, now),
            hold.tokens.units,
            tentative,
            key.account.contract.weight,
        )

    def _tokens(self, key: Key, backend: str, now: float) -> Window:
        """Tokens per minute as the headers show them: by contract, or what pressure leaves of it."""
        account = key.account
        by_contract = refusals.token_window(key, now)
        return self.shares.window(backend, account.account_id, account.contract, by_contract, now)
