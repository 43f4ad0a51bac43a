"""In any order of events, the limiter grants no more than there is and holds nothing for requests that have ended.

Requests come, are counted, settle, are released late, twice or never; gateways die; leases, keys and grants expire; the
limiter forgets and restarts; clocks are stepped and disagree. The test drives the ledger (`Books`)
and the gateways, so it knows the true state. It also shortens no reply that can be paid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serve_app.contracts.books import KeySnapshot
from serve_app.contracts.limiting import (
    Adjust,
    Admit,
    Grant,
    OpenHold,
    Recovering,
    Refusal,
    Release,
    Renew,
    UnknownKey,
)
from serve_app.contracts.limits import Contract
from serve_app.contracts.periods import CLOCK_SKEW_S
from serve_app.limiter.accounts import Key
from serve_app.limiter.admission import Admission
from serve_app.limiter.checks import output_budget
from tests.limiter.books import Books
from tests.limiter.rates import Rates
from tests.limiter.world import MIDNIGHT, NOON, key_snapshot

CONTRACT = Contract(rpm=20, tpm=6000, concurrency=4)
LEASE_S = 10.0
RECOVERY_S = 1.5
IDLE_S = 600.0
LOOK_UP_S = 5.0  # no answer of the ledger takes longer
BUDGET = 1500
BUDGETED = "k2"
KEYS = {
    "k0": key_snapshot("d0", "k0", "a", True, 1),
    "k1": key_snapshot("d1", "k1", "a", True, 1, rpm=8, tpm=2000, concurrency=2),
    "k2": key_snapshot("d2", "k2", "a", True, 1, budget=BUDGET, budget_period="day", models=("m", "n")),
}
# Of each clock from the true time: mostly as far as they may differ, which is where it matters.
JITTER = st.sampled_from([-0.45 * CLOCK_SKEW_S, 0.0, 0.45 * CLOCK_SKEW_S])
STEPS = st.sampled_from([0.1, 0.3, 0.6, 1.0, 3.0, LEASE_S - 0.1])
REQUESTS = st.fixed_dictionaries(
    {
        "which": st.integers(0, 5),
        "model": st.sampled_from(["m", "m", "m", "n"]),
        "estimate": st.sampled_from([0, 100, 300]),
        "count": st.sampled_from([1, 60, 120, 300]),
        "output": st.sampled_from([1, 100, 300]),
        "prices": st.sampled_from([(1, 1), (2, 5), (3, 0)]),
        "idempotency_key": st.sampled_from([None, None, None, "i"]),
        "jitter": JITTER,
        "late": st.booleans(),
    }
)
SHARES = st.sampled_from([0.0, 0.3, 1.0, 1.0])


@dataclass
class Running:
    """A request as its gateway sees it. `count` is the prompt as the tokenizer counts it."""

    grant: Grant
    ask: Admit
    count: int
    started_at: float  # on its gateway's clock
    is_counted: bool = True  # False: the replica has not answered yet, so nothing was produced
    release: Release | None = None  # once settled

    def cost(self, completion: int) -> int:
        return self.count * self.ask.prompt_price + completion * self.ask.output_price

    @property
    def most(self) -> int:
        return self.cost(self.grant.max_tokens) if self.is_counted else 0


class Limits(RuleBasedStateMachine):
    """Subclasses define what is scarce; with everything scarce at once, most states are never reached."""

    topped_up = 5000
    used = ("k0", "k1", "k2")
    starts_at = NOON
    contract = CONTRACT

    reads = Bundle("reads")  # of the ledger, on their way to the limiter
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(self.topped_up, dict(KEYS))
        self.now = 100.0
        self.true = self.starts_at
        self.jitter = 0.0  # of the limiter's wall clock
        self.running: dict[str, Running] = {}
        self.serial = 0
        self.epoch = 0
        self.start(0.0)

    def start(self, recovery_s: float) -> None:
        self.admission = Admission(
            lambda: self.now, Random(1), self.contract, lease_s=LEASE_S, recovery_s=recovery_s, wall=lambda: self.at
        )
        self.epoch += 1
        # Requests and tokens a minute.
        self.rates = Rates({"": (self.contract.rpm, self.contract.tpm), "k1": (8, 2000)})

    @property
    def at(self) -> float:
        return self.true + self.jitter

    # The ledger

    @rule(
        what=st.sampled_from(["top_up", "grant", "grant", "expire", "active", "models", "expires_at", "nothing"]),
        key_id=st.sampled_from(sorted(KEYS)),
        amount=st.sampled_from([1, 300, 2000]),
        life_s=st.sampled_from([2.0, 4.0, 15.0, 100.0]),
    )
    def the_operator_changes(self, what: str, key_id: str, amount: int, life_s: float) -> None:
        match what:
            case "top_up":
                self.books.top_up(amount)
            case "grant":
                self.books.grant(amount, self.true + life_s)
                if self.admission.knows_account("a"):
                    # The limiter learns of the grant before it expires, as in every realistic case.
                    self.admission.apply(self.books.account())
            case "expire":
                # Only when no request that began before is open, as the ledger's grace period ensures.
                oldest = min((one.started_at for one in self.running.values() if not one.release), default=self.true)
                self.books.expire(min(oldest, self.true) - 1)
            case _:
                terms: dict[str, Any] = {"active": True, "models": None, "expires_at": None}
                changes = {"active": False, "models": ("m",), "expires_at": self.true + life_s}
                terms |= {name: value for name, value in changes.items() if name == what}
                self.books.change_key(key_id, **terms)

    @rule(target=reads, key_id=st.none() | st.sampled_from(sorted(KEYS)), jitter=JITTER)
    def read(self, key_id: str | None, jitter: float) -> Any:
        state = self.books.account() if key_id is None else self.books.key(key_id, self.true + jitter)
        return self.epoch, self.now, state

    @rule(read=reads)
    def arrive(self, read: tuple[int, float, Any]) -> None:
        """In any order and any number of times, but not for ever, nor in a limiter that had not asked."""
        epoch, at, state = read
        if epoch == self.epoch and self.now - at <= LOOK_UP_S:
            self.admission.apply(state)

    def apply_all(self, jitter: float) -> None:
        self.admission.apply(self.books.account())
        for key_id in KEYS:
            self.admission.apply(self.books.key(key_id, self.true + jitter))

    # Requests

    @rule(asked=st.lists(REQUESTS, min_size=1, max_size=4))
    def requests(self, asked: list[dict[str, Any]]) -> None:
        for one in asked:
            self.request(**one)

    @rule(asked=REQUESTS, share=SHARES, gateway=JITTER, ledger=JITTER)
    def a_short_request(self, asked: dict[str, Any], share: float, gateway: float, ledger: float) -> None:
        if name := self.request(**asked):
            self.end(name, share, gateway, ledger)
            self.release(name, False)

    def request(
        self,
        which: int,
        model: str,
        estimate: int,
        count: int,
        output: int,
        prices: tuple[int, int],
        idempotency_key: str | None,
        jitter: float,
        late: bool,
    ) -> str | None:
        self.serial += 1
        name = f"r{self.serial}"
        key_id = self.used[which % len(self.used)]
        ask = Admit(name, "g", KEYS[key_id].digest, model, estimate, output, *prices, "b", idempotency_key)
        before = self.everything()
        answer = self.admission.admit(ask)
        if isinstance(answer, UnknownKey):
            assert self.everything() == before
            self.admission.apply(self.books.account())
            self.admission.apply(self.books.key(key_id, self.true + jitter))
            before = self.everything()
            answer = self.admission.admit(ask)
        if isinstance(answer, Recovering):
            assert self.everything() == before
            assert 0 < answer.retry_in_s <= 2 * CLOCK_SKEW_S, "only where days meet"
            return None
        if isinstance(answer, Refusal):
            assert self.everything() == before, "a refused request consumes nothing"
            self.justify(answer, ask, key_id)
            return None
        assert isinstance(answer, Grant), answer
        self.may(ask, key_id)
        running = self.running[name] = Running(answer, ask, count, self.true + jitter)
        self.rates.admit(name, key_id, self.now, answer.tokens_charged)
        if not answer.tentative:
            self.is_cut_rightly(running, estimate)
        # As a replica decides: prompt and whole output must fit the hold, else the hold is adjusted first.
        if answer.tentative or running.most > answer.hold:
            running.is_counted = False
            if late:
                return None
            if not self.adjust(name):
                assert name in self.running or self.same_money(before), "refused at the count, it has held nothing"
                return None
        return name

    @precondition(lambda self: any(not one.is_counted for one in self.running.values()))
    @rule(data=st.data(), looked_up=st.booleans(), jitter=JITTER)
    def a_replica_counts(self, data: st.DataObject, looked_up: bool, jitter: float) -> None:
        """Perhaps after a restart, while the limiter does not know the account or the key."""
        name = data.draw(st.sampled_from([name for name, one in self.running.items() if not one.is_counted]))
        if looked_up:
            self.admission.apply(self.books.account())
            self.admission.apply(self.books.key(self.running[name].grant.key_id, self.true + jitter))
        self.adjust(name)

    def adjust(self, name: str) -> bool:
        """Returns whether the request may run now."""
        running = self.running[name]
        hold = self.admission._open_holds.get(name)
        assert hold is not None
        is_known = hold.key.is_known
        answer = self.admission.adjust(Adjust(name, running.count, running.ask.key_digest))
        assert isinstance(answer, UnknownKey) != is_known
        if isinstance(answer, UnknownKey):
            return False
        if isinstance(answer, Recovering):
            assert 0 < answer.retry_in_s <= 2 * CLOCK_SKEW_S, "only where days meet"
            return False
        if isinstance(answer, Refusal):
            assert answer.code in ("insufficient_balance", "budget_exceeded")
            del self.running[name]
            self.is_cut_rightly(running, running.count)
            self.rates.undo(name)
            return False
        assert isinstance(answer, Grant)
        running.grant, running.is_counted = answer, True
        self.rates.correct(name, answer.tokens_charged)
        assert running.most <= answer.hold
        assert answer.max_tokens >= 1
        self.is_cut_rightly(running, running.count)
        return True

    def is_cut_rightly(self, running: Running, prompt: int) -> None:
        """A request gets all output that it asked for and that can be paid, where the limiter knows the newest state.

        A request that is not running was refused: not even one token of output can be paid.
        """
        name, ask, key_id = running.ask.request_id, running.ask, running.grant.key_id
        given = running.grant.max_tokens if name in self.running else 0
        others = [one for one in self.running.values() if one is not running]
        account = self.admission._accounts["a"]
        key = account.keys[key_id]
        if given == ask.max_tokens or not self.is_in_sync([*others, running]):
            return
        available = self.books.left_after([(one.started_at, one.grant.hold) for one in others], running.started_at)
        if key_id == BUDGETED:
            assert key.snapshot is not None
            if key.spent_version != self.books.version or abs(self.true - self.day_ends()) < 3 * CLOCK_SKEW_S:
                return
            period = self.books.key(key_id, self.true)
            held = sum(one.grant.hold for one in others if one.grant.key_id == key_id)
            available = min(available, BUDGET - period.spent - held)
        assert given == output_budget(available, prompt, ask.max_tokens, ask.prompt_price, ask.output_price)

    def may(self, ask: Admit, key_id: str) -> None:
        """By the limiter's own state, it had to admit the request."""
        state = self.known(key_id)
        others = list(self.running.values())
        assert state.active
        assert state.expires_at is None or self.at < state.expires_at
        assert state.models is None or ask.model in state.models
        assert ask.idempotency_key is None or ask.idempotency_key not in [r.ask.idempotency_key for r in others]
        assert len(others) < self.contract.concurrency
        assert (own := state.limits.get("concurrency")) is None or len(
            [r for r in others if r.grant.key_id == key_id]
        ) < own

    def justify(self, refusal: Refusal, ask: Admit, key_id: str) -> None:
        """By the limiter's own state, it had to refuse the request."""
        state = self.known(key_id)
        account = self.admission._accounts["a"]
        holds = account.holds
        match refusal.code:
            case "invalid_api_key":
                assert not state.active or (state.expires_at is not None and state.expires_at <= self.at)
            case "model_not_found":
                assert state.models is not None
                assert ask.model not in state.models
            case "idempotency_in_progress":
                assert ask.idempotency_key in [hold.terms.idempotency_key for hold in holds.values()]
            case "insufficient_balance":
                assert account.spendable(self.at) <= 0
            case "budget_exceeded":
                assert account.keys[key_id].left(self.at) <= 0
            case "concurrency":
                mine = [hold for hold in holds.values() if hold.key.key_id == key_id]
                own = state.limits.get("concurrency")
                of_key = own is not None and len(mine) >= own
                assert len(holds) >= self.contract.concurrency or of_key
            case code:
                assert code in ("requests", "tokens")
        assert refusal.retry_after_s is None or 0 < refusal.retry_after_s <= 60

    @rule(target=settled, data=st.data(), share=SHARES, gateway=JITTER, ledger=JITTER)
    def settle(self, data: st.DataObject, share: float, gateway: float, ledger: float) -> object:
        ready = self.ready()
        if not ready:
            return multiple()
        name = data.draw(st.sampled_from(ready))
        self.end(name, share, gateway, ledger)
        return name

    def end(self, name: str, share: float, gateway: float, ledger: float) -> None:
        """Settles the request; the limiter learns of it at once or later."""
        request = self.running[name]
        completion = round(share * request.grant.max_tokens)
        self.charge(request, request.cost(completion), gateway)
        key = self.books.key(request.grant.key_id, self.true + ledger)
        request.release = Release(
            name,
            request.count,
            completion,
            self.books.balance,
            self.books.version,
            account_id="a",
            key_id=key.key_id,
            key_spent=key.spent if key.budget is not None else None,
            key_period=key.spent_period if key.budget is not None else None,
        )

    def charge(self, request: Running, cost: int, jitter: float) -> None:
        self.books.charge(request.grant.key_id, cost, request.started_at, self.true + jitter)

    @rule(name=consumes(settled), twice=st.booleans())
    def a_release_arrives(self, name: str, twice: bool) -> None:
        self.release(name, twice)

    def release(self, name: str, twice: bool) -> None:
        request = self.running.pop(name, None)
        if request is None:
            return
        assert request.release is not None
        for _ in range(1 + twice):
            self.admission.release(request.release)
        self.rates.correct(name, request.release.prompt_tokens + request.release.completion_tokens)

    @rule(data=st.data(), refused=st.booleans())
    def fail(self, data: st.DataObject, refused: bool) -> None:
        """Ends without a charge: cancelled before anything was produced, or refused by the replica."""
        if ready := self.ready():
            name = data.draw(st.sampled_from(ready))
            del self.running[name]
            self.admission.release(Release(name, 0, 0, refused=refused))
            if refused:
                self.rates.undo(name)
            else:
                self.rates.correct(name, 0)

    @rule(data=st.data(), charged=st.booleans(), gateway=JITTER, ledger=JITTER)
    def gateway_dies(self, data: st.DataObject, charged: bool, gateway: float, ledger: float) -> None:
        """The replica settles, the change reaches the limiter, and only then the lease expires."""
        if ready := self.ready():
            request = self.running.pop(data.draw(st.sampled_from(ready)))
            if charged:
                self.charge(request, request.most, gateway)
            self.apply_all(ledger)

    def ready(self) -> list[str]:
        return [name for name, request in self.running.items() if request.release is None and request.is_counted]

    # Time

    @rule(what=st.sampled_from(["both", "both", "monotonic", "step", "midnight", "off"]), seconds=STEPS, jitter=JITTER)
    def clocks_move(self, what: str, seconds: float, jitter: float) -> None:
        match what:
            case "both":
                self.pass_time(seconds, seconds)
            case "monotonic":
                self.pass_time(seconds, 0.0)
            case "step":
                self.pass_time(0.0, 20000 * seconds)
            case "midnight":
                left_s = (MIDNIGHT - self.true) % 86400.0
                self.pass_time(0.0, max(0.0, left_s - seconds))
            case "off":
                self.jitter = jitter

    def pass_time(self, seconds: float, wall_s: float) -> None:
        assert self.admission.renew(Renew("g", tuple(self.running))) == ()
        self.now += seconds
        self.true += wall_s
        self.admission.expire()
        self.admission.forget_idle(IDLE_S, 10)

    @precondition(lambda self: not self.running)
    @rule()
    def no_request_comes_for_long(self) -> None:
        for _ in range(3):
            self.pass_time(IDLE_S + 300, IDLE_S + 300)
        assert len(self.admission._keys) == len(self.admission._accounts) == 0, "all is forgotten"
        self.epoch += 1  # no look-up takes this long

    @rule(die=st.integers(0, 3))
    def limiter_restarts(self, die: int) -> None:
        if die:  # seldom, because it makes the limiter forget what earlier steps have built up
            return
        self.start(RECOVERY_S)
        for name in self.admission.renew(Renew("g", tuple(self.running))):
            request = self.running[name]
            grant, ask = request.grant, request.ask
            prices = ask.prompt_price, ask.output_price
            amounts = grant.hold, grant.tokens_charged, *prices, grant.max_tokens
            terms = ask.backend, ask.idempotency_key, request.started_at
            self.admission.announce(OpenHold(name, "a", grant.key_id, *amounts, *terms), "g")
            request.ask = replace(ask, max_tokens=grant.max_tokens)  # the rest is not asked for again
        answer = self.admission.admit(Admit("early", "g", "d0", "m", 1, 1, 1, 1))
        assert isinstance(answer, Recovering)
        self.pass_time(RECOVERY_S, RECOVERY_S)

    # Invariants

    @invariant()
    def nothing_is_charged_that_cannot_be_paid(self) -> None:
        assert self.books.owed == 0
        assert self.books.topped_up >= 0

    @invariant()
    def all_that_runs_can_be_paid(self) -> None:
        assert self.books.left_after(self.outstanding(), self.true + 10**9) >= 0

    @invariant()
    def no_budget_is_overspent(self) -> None:
        for (key_id, period), spent in self.books.spent.items():
            assert spent <= BUDGET, (key_id, period)

    @invariant()
    def the_limiter_never_thinks_there_is_more_than_there_is(self) -> None:
        account = self.admission._accounts.get("a")
        if account is not None and account.balance is not None:
            assert account.spendable(self.at) <= max(0, self.books.left_after(self.outstanding(), self.true))

    @invariant()
    def with_the_newest_states_it_knows_exactly_what_is_free(self) -> None:
        """held + free == committed, less the expired rest that no running request may still use."""
        requests = list(self.running.values())
        if self.is_in_sync(requests):
            costs = [(one.started_at, one.grant.hold) for one in requests]
            assert self.admission._accounts["a"].spendable(self.at) == self.books.left_after(costs, self.true)

    def is_in_sync(self, requests: list[Running]) -> bool:
        """Returns whether the limiter knows the newest balance, and no grant expires close to now or to a start."""
        account = self.admission._accounts.get("a")
        if account is None or account.snapshot is None or account.version != self.books.version:
            return False
        times = [self.true, *(one.started_at for one in requests)]
        edges = [abs(expires_at - at) < 3 * CLOCK_SKEW_S for expires_at, _ in self.books.lots for at in times]
        # Refused requests are not held any more.
        is_same = account.snapshot.version == account.version and account.holds.keys() == self.running.keys()
        return is_same and not any(edges) and not any(one.release for one in requests)

    def day_ends(self) -> float:
        """Returns the end of a day that is the closest to now."""
        return MIDNIGHT + round((self.true - MIDNIGHT) / 86400.0) * 86400.0

    @invariant()
    def every_open_request_has_its_slots_and_its_money(self) -> None:
        assert self.admission.status("a").open_requests >= len(self.running)
        assert self.admission.status("a").held >= sum(one.grant.hold for one in self.running.values())

    @invariant()
    def sums_are_the_sums_of_the_holds(self) -> None:
        account = self.admission._accounts.get("a")
        if account is None:
            return
        assert account.held == sum(hold.amount for hold in account.holds.values())
        assert len(account.holds) == len(self.admission._open_holds)
        for key in account.keys.values():
            mine = [hold for hold in account.holds.values() if hold.key is key]
            assert (key.open, key.held) == (len(mine), sum(hold.amount for hold in mine))
        named = {hold.terms.idempotency_key for hold in account.holds.values()} - {None}
        assert set(account.idempotent) == named
        assert all(request_id in account.holds for request_id in account.idempotent.values())

    @invariant()
    def idle_is_what_is_not_in_use(self) -> None:
        registry = self.admission._registry
        idle = {account for account in registry.accounts.values() if not account.keys}
        keys: set[Key] = {key for account in registry.accounts.values() for key in account.keys.values()}
        assert set(registry._idle) == idle | {key for key in keys if not key.open}
        since = list(registry._idle.values())
        assert since == sorted(since)
        assert set(registry.keys.values()) <= keys
        assert all(key.snapshot is not None and key.snapshot.digest == digest for digest, key in registry.keys.items())

    @invariant()
    def buckets_grant_no_more_than_rate_times_time_plus_burst(self) -> None:
        self.rates.check()

    def outstanding(self) -> list[tuple[float, int]]:
        """Returns the start and the maximum cost of each running request."""
        return [(one.started_at, one.most) for one in self.running.values() if one.release is None and one.is_counted]

    def known(self, key_id: str) -> KeySnapshot:
        state = self.admission._keys[KEYS[key_id].digest].snapshot
        assert state is not None
        return state

    def everything(self) -> Any:
        """The state that a refusal must not change."""
        return list(self._everything())

    def _everything(self) -> Iterator[Any]:
        for account in self.admission._accounts.values():
            requests, tokens = account.requests[0].tat, account.tokens[0].tat
            yield requests, tokens, account.held, sorted(account.holds), dict(account.idempotent)
            for key in account.keys.values():
                yield key.held, key.open, key.mean_output
                yield [bucket.tat for bucket in (*key.requests, *key.tokens)]
        yield len(self.admission._open_holds)

    def same_money(self, before: Any) -> bool:
        """As `everything`, but for the rates, which may have been rounded, and requests' order."""
        after = self.everything()
        return [one[2:] for one in after if isinstance(one, tuple) and len(one) == 5] == [
            one[2:] for one in before if isinstance(one, tuple) and len(one) == 5
        ]

    def teardown(self) -> None:
        for name, request in self.running.items():
            self.admission.release(request.release or Release(name, 0, 0))
        self.now += 2 * LEASE_S
        self.admission.expire()
        assert (self.admission.status("a").held, self.admission.status("a").open_requests) == (0, 0)
        self.sums_are_the_sums_of_the_holds()
        self.now += 10**7
        self.admission.forget_idle(IDLE_S, 100)
        self.now += IDLE_S
        self.admission.forget_idle(IDLE_S, 100)
        assert (self.admission._accounts, self.admission._keys, self.admission._registry._idle) == ({}, {}, {})


class Balance(Limits):
    """The balance alone is scarce."""

    topped_up = 2000
    used = ("k0",)
    contract = Contract(rpm=10**6, tpm=10**9, concurrency=4)


class Grants(Limits):
    """Nearly all money expires."""

    topped_up = 50
    used = ("k0",)


class Budgets(Limits):
    """The budget is scarce, and the day is about to end."""

    topped_up = 10**6
    used = ("k2",)
    starts_at = MIDNIGHT - 3.0


class Keys(Limits):
    """Rates and concurrency of a key are scarce."""

    topped_up = 10**7
    used = ("k1", "k1", "k0")


@pytest.mark.parametrize(
    "lives",
    [20, pytest.param(100, marks=pytest.mark.slow), pytest.param(300, marks=(pytest.mark.slow, pytest.mark.long))],
)
@pytest.mark.parametrize("machine", [Limits, Balance, Grants, Budgets, Keys])
def test_no_order_of_events_grants_more_than_there_is_or_keeps_a_hold(machine: type[Limits], lives: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=lives, stateful_step_count=50))
