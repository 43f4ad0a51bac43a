"""Who may run: one decision over key, balance, concurrency and rates, all or nothing, and its corrections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from serve_app.limits import refusals
from serve_app.limits.charges import mean_output, output_budget, token_charge
from serve_app.limits.holds import Account, Hold, Leases
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
    Recovering,
    Refusal,
    Release,
    Renew,
    UnknownKey,
)

_MEAN_WEIGHT: Final = 0.2  # of the newest reply in the moving average: about the last ten replies count


@dataclass(frozen=True, slots=True)
class Stats:
    """What the limiter holds now and has done since it started."""

    accounts: int
    keys: int
    open_holds: int
    held: int  # nano-units
    admitted: int
    released: int
    expired: int
    announced: int
    refused: dict[str, int] = field(default_factory=dict)  # by code


class Admission:
    """Decides over requests. Not thread-safe, does no I/O, and never waits.

    A refused request consumes nothing at all: every check comes before the first change. The order of the checks is
    401 (key, account), 402, 429 (concurrency, requests, tokens).

    `clock` answers seconds of a clock that never runs backwards; `rng` spreads the times to wait. A hold lives for
    `lease_s` unless it is renewed. For the first `recovery_s` after the start, `admit` answers `Recovering`, so that
    gateways announce the holds that this limiter does not know; take it longer than the gateways' heartbeat, or 0
    where no gateway can have open requests.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: Random,
        default_contract: Contract,
        lease_s: float = 10.0,
        recovery_s: float = 3.0,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._default = default_contract
        self._accounts: dict[str, Account] = {}
        self._keys: dict[str, KeyState] = {}
        self._leases = Leases(lease_s)
        self._recovering_until = clock() + recovery_s
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    @property
    def recovering_until(self) -> float:
        """The clock's time up to which `admit` answers `Recovering`."""
        return self._recovering_until

    @property
    def default_contract(self) -> Contract:
        """The limits of accounts that have none of their own; may be set at any time."""
        return self._default

    @default_contract.setter
    def default_contract(self, contract: Contract) -> None:
        self._default = contract
        for account in self._accounts.values():
            account.limit(contract)

    def knows(self, key_digest: str) -> bool:
        """Whether the key and its account need no look-up."""
        key = self._keys.get(key_digest)
        if key is None:
            return False
        account = self._accounts.get(key.account_id)
        return not key.active or (account is not None and account.balance is not None)

    def identify(self, ask: Identify) -> Identity | Refusal | UnknownKey:
        """Whose key it is, without admitting anything: an active key of an active account, or 401."""
        account = self._authenticate("", ask.key_digest)
        if isinstance(account, Account):
            return Identity(account.account_id, self._keys[ask.key_digest].key_id)
        return account

    def admit(self, ask: Admit) -> Grant | Refusal | UnknownKey | Recovering:
        """Lets one request in, or says why not. Asked again for an open request, it answers the same grant."""
        request_id = ask.request_id
        known = self._leases.get(request_id)
        if known is not None:
            return known.grant
        now = self._clock()
        if now < self._recovering_until:
            return Recovering(request_id, self._recovering_until - now)
        account = self._authenticate(request_id, ask.key_digest)
        if not isinstance(account, Account):
            return account

        free = account.free
        if free <= 0:
            return self._refuse(refusals.no_balance(request_id, account))
        budget = output_budget(free, ask.prompt_tokens, ask.max_tokens, ask.prompt_price, ask.output_price)
        tentative = budget < 1
        if tentative:
            # An estimate is no reason to refuse: what seems too expensive gets all there is until it is counted.
            budget = ask.max_tokens
        amount = free if tentative else ask.prompt_tokens * ask.prompt_price + budget * ask.output_price

        if len(account.holds) >= account.contract.concurrency:
            return self._refuse(refusals.too_many_at_once(request_id, account, now, self._rng))
        request_s = account.requests.cost_s(1)
        wait_s = account.requests.wait_s(now, request_s)
        if wait_s:
            return self._refuse(refusals.too_many_requests(request_id, account, now, wait_s, self._rng))
        charge = token_charge(ask.prompt_tokens, budget, account)
        charge_s = account.tokens.cost_s(charge)
        wait_s = account.tokens.wait_s(now, charge_s)
        if wait_s:
            return self._refuse(refusals.too_many_tokens(request_id, account, charge, now, wait_s, self._rng))

        key_id = self._keys[ask.key_digest].key_id
        hold = Hold(account, ask.holder, amount, ask.max_tokens, ask.prompt_price, ask.output_price)
        hold.request_drained_at = account.requests.charge(now, request_s)
        hold.token_drained_at = account.tokens.charge(now, charge_s)
        hold.charged, hold.charged_s = charge, charge_s
        hold.grant = _grant(request_id, key_id, hold, budget, now, tentative)
        self._open(request_id, hold, now)
        self._counts["admitted"] += 1
        return hold.grant

    def adjust(self, ask: Adjust) -> Grant | Refusal | Recovering:
        """Replaces the estimated prompt by the counted one: new hold, new output budget, corrected token bucket.

        When the prompt and one token of output cannot be paid, answers 402 and undoes the admission as if it had
        never been. A request that is not open here gets 503, or `Recovering` while it may still be announced.
        """
        hold = self._leases.get(ask.request_id)
        now = self._clock()
        if hold is None:
            if now < self._recovering_until:
                return Recovering(ask.request_id, self._recovering_until - now)
            return self._refuse(refusals.lost(ask.request_id, self._rng))
        account = hold.account
        # After a restart the balance may not be known yet: then the hold as announced is all there is to spend.
        available = hold.amount if account.balance is None else max(0, account.free + hold.amount)
        budget = output_budget(available, ask.prompt_tokens, hold.asked, hold.prompt_price, hold.output_price)
        if budget < 1:
            needed = ask.prompt_tokens * hold.prompt_price + hold.output_price
            refusal = refusals.too_expensive(ask.request_id, account, ask.prompt_tokens, needed, available)
            self._undo(ask.request_id, hold, now)
            return self._refuse(refusal)
        account.resize(hold, ask.prompt_tokens * hold.prompt_price + budget * hold.output_price)
        hold.recharge(now, token_charge(ask.prompt_tokens, budget, account))
        hold.grant = _grant(ask.request_id, hold.grant.key_id, hold, budget, now, tentative=False)
        return hold.grant

    def release(self, end: Release) -> None:
        """Ends a request. Repeating it is harmless; a newer balance is taken over even if the hold is gone."""
        hold = self._leases.get(end.request_id)
        account_id = hold.account.account_id if hold is not None else end.account_id
        if account_id is not None and end.balance is not None and end.version is not None:
            # In the step that frees the hold: see Account on why that keeps `free` true. Also for an account that is
            # not known here, so that a look-up which was read before this settlement is recognised as old.
            self._known_or_new(account_id).commit(end.balance, end.version)
        if hold is None:
            return
        now = self._clock()
        if end.refused:
            self._undo(end.request_id, hold, now)
            return
        hold.recharge(now, end.prompt_tokens + end.completion_tokens)
        if end.completion_tokens:
            mean = mean_output(hold.account)
            hold.account.mean_output = mean + _MEAN_WEIGHT * (end.completion_tokens - mean)
        self._close(end.request_id, hold)
        self._counts["released"] += 1

    def renew(self, beat: Renew) -> tuple[str, ...]:
        """Renews leases; answers the requests that are not open here, which the gateway announces again."""
        return self._leases.renew(beat.holder, beat.request_ids, self._clock())

    def announce(self, open_hold: OpenHold, holder: str) -> None:
        """Takes in a hold that was granted before this limiter started or whose lease had run out.

        It counts at once, also while the account's balance is not known yet, and whatever the limits say: the
        request is already running. A hold that is open here only has its lease renewed and moved to `holder`.
        """
        now = self._clock()
        known = self._leases.get(open_hold.request_id)
        if known is not None:
            known.holder = holder
            self._leases.start(open_hold.request_id, known, now)
            return
        account = self._known_or_new(open_hold.account_id)
        prices = open_hold.prompt_price, open_hold.output_price
        hold = Hold(account, holder, open_hold.hold, open_hold.max_tokens, *prices)
        hold.recharge(now, open_hold.tokens_charged)
        hold.token_drained_at = account.tokens.tat
        hold.grant = _grant(open_hold.request_id, open_hold.key_id, hold, open_hold.max_tokens, now, tentative=False)
        self._open(open_hold.request_id, hold, now)
        self._counts["announced"] += 1

    def expire(self) -> list[str]:
        """Frees the holds whose lease has run out and answers their requests.

        What the requests used is not known, so their charge on the token bucket stays until it drains.
        """
        gone = self._leases.expired(self._clock())
        for request_id in gone:
            hold = self._leases.get(request_id)
            assert hold is not None
            self._close(request_id, hold)
        self._counts["expired"] += len(gone)
        return gone

    def apply(self, state: AccountState | KeyState) -> None:
        """Takes over what the ledger committed; anything older than what is known is ignored."""
        if isinstance(state, AccountState):
            self._known_or_new(state.account_id).apply(state, self._default)
            return
        known = self._keys.get(state.digest)
        if known is None or state.version > known.version:
            self._keys[state.digest] = state
            self._known_or_new(state.account_id).keys.add(state.digest)

    def forget(self, account_id: str) -> bool:
        """Drops an account and its keys, which the next request looks up again; True when nothing of it is left.

        What still counts stays: open holds, and rates that have not drained. For accounts that have been idle; a
        state that was read before and arrives after would be taken for new.
        """
        account = self._accounts.get(account_id)
        if account is None:
            return True
        for digest in account.keys:
            self._keys.pop(digest, None)
        account.keys.clear()
        account.balance = None
        now = self._clock()
        if account.holds or account.requests.reset_s(now) or account.tokens.reset_s(now):
            return False
        del self._accounts[account_id]
        return True

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
        return account.contract if account is not None else self._default

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
            refused=dict(self._refused),
        )

    def _authenticate(self, request_id: str, key_digest: str) -> Account | Refusal | UnknownKey:
        key = self._keys.get(key_digest)
        if key is None:
            return UnknownKey(request_id, key_digest)
        if not key.active:
            return self._refuse(refusals.revoked(request_id))
        account = self._accounts.get(key.account_id)
        if account is None or account.balance is None:
            return UnknownKey(request_id, key_digest)
        if not account.active:
            return self._refuse(refusals.suspended(request_id))
        return account

    def _known_or_new(self, account_id: str) -> Account:
        account = self._accounts.get(account_id)
        if account is None:
            account = self._accounts[account_id] = Account(account_id, self._default)
        return account

    def _open(self, request_id: str, hold: Hold, now: float) -> None:
        hold.account.open(request_id, hold)
        self._leases.start(request_id, hold, now)

    def _close(self, request_id: str, hold: Hold) -> None:
        self._leases.end(request_id)
        hold.account.close(request_id)

    def _undo(self, request_id: str, hold: Hold, now: float) -> None:
        hold.recharge(now, 0)
        requests = hold.account.requests
        requests.refund(now, requests.cost_s(1), hold.request_drained_at)
        self._close(request_id, hold)

    def _refuse(self, refusal: Refusal) -> Refusal:
        self._refused[refusal.code] += 1
        return refusal


def _grant(request_id: str, key_id: str, hold: Hold, budget: int, now: float, tentative: bool) -> Grant:
    account = hold.account
    return Grant(
        request_id=request_id,
        account_id=account.account_id,
        key_id=key_id,
        hold=hold.amount,
        max_tokens=budget,
        requests=refusals.window(account.requests, now),
        tokens=refusals.window(account.tokens, now),
        tokens_charged=hold.charged,
        tentative=tentative,
    )
