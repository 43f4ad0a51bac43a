"""A balance is never overdrawn, in any order in which settlements, releases and snapshots arrive."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from serve_app.contracts.books import AccountSnapshot
from serve_app.contracts.limiting import (
    Adjust,
    Admit,
    Grant,
    OpenHold,
    Refusal,
    Release,
    Renew,
    UnknownKey,
)
from serve_app.contracts.limits import Contract
from serve_app.limiter.admission import Admission
from tests.limiter.world import account_snapshot, key_snapshot

CONTRACT = Contract(rpm=10**6, tpm=10**9, concurrency=4)
LEASE_S = 10.0


@dataclass
class Running:
    """A request as its gateway sees it. `count` is the prompt as the tokenizer counts it."""

    grant: Grant
    ask: Admit
    count: int
    release: Release | None = None  # once settled

    def cost(self, completion: int) -> int:
        return self.count * self.ask.prompt_price + completion * self.ask.output_price


class Money(RuleBasedStateMachine):
    """One account; the ledger is a number with a version, as committed."""

    states = Bundle("states")  # of the account, read from the ledger, on their way to the limiter
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.balance = self.deposits = 5000
        self.version = 1
        self.charges = 0
        self.running: dict[str, Running] = {}
        self.serial = 0
        self.epoch = 0
        self.start(0.0)

    def start(self, recovery_s: float) -> None:
        self.admission = Admission(lambda: self.now, Random(1), CONTRACT, lease_s=LEASE_S, recovery_s=recovery_s)
        self.epoch += 1

    def state(self) -> AccountSnapshot:
        return account_snapshot("a", self.balance, self.version)

    @rule(amount=st.integers(1, 2000))
    def deposit(self, amount: int) -> None:
        self.balance += amount
        self.deposits += amount
        self.version += 1

    @initialize()
    def know(self) -> None:
        self.admission.apply(key_snapshot("d", "k", "a", True, 1))
        self.admission.apply(self.state())

    @rule(target=states)
    def read(self) -> tuple[int, AccountSnapshot]:
        return self.epoch, self.state()

    @rule(state=states)
    def arrive(self, state: tuple[int, AccountSnapshot]) -> None:
        """In any order and any number of times, but a limiter only gets what was read since it started."""
        if state[0] == self.epoch:
            self.admission.apply(state[1])

    @rule(
        estimate=st.integers(0, 300),
        count=st.integers(1, 300),
        output=st.integers(1, 300),
        prices=st.tuples(st.integers(1, 3), st.integers(0, 5)),
    )
    def request(self, estimate: int, count: int, output: int, prices: tuple[int, int]) -> None:
        self.serial += 1
        ask = Admit(f"r{self.serial}", "g", "d", "m", estimate, output, *prices)
        answer = self.admission.admit(ask)
        if isinstance(answer, UnknownKey):
            self.admission.apply(key_snapshot("d", "k", "a", True, 1))
            self.admission.apply(self.state())
            answer = self.admission.admit(ask)
        assert isinstance(answer, Grant | Refusal), answer
        if isinstance(answer, Refusal):
            return
        running = Running(answer, ask, count)
        # As a replica decides: prompt and whole output must fit the hold, else the hold is adjusted first.
        if running.cost(answer.max_tokens) > answer.hold:
            answer = self.admission.adjust(Adjust(ask.request_id, count))
            if isinstance(answer, Refusal):
                assert answer.status == 402
                return
            assert isinstance(answer, Grant)
            running.grant = answer
        assert not answer.tentative or running.cost(answer.max_tokens) <= answer.hold
        assert running.cost(answer.max_tokens) <= answer.hold
        assert answer.max_tokens >= 1
        self.running[ask.request_id] = running

    @rule(target=settled, data=st.data(), share=st.floats(0, 1))
    def settle(self, data: st.DataObject, share: float) -> object:
        ready = [name for name, request in self.running.items() if request.release is None]
        if not ready:
            return multiple()
        name = data.draw(st.sampled_from(ready))
        request = self.running[name]
        completion = round(share * request.grant.max_tokens)
        self.charge(request.cost(completion))
        request.release = Release(name, request.count, completion, self.balance, self.version, account_id="a")
        return name

    def charge(self, amount: int) -> None:
        self.balance -= amount
        self.charges += amount
        self.version += 1

    @rule(name=consumes(settled), twice=st.booleans())
    def release(self, name: str, twice: bool) -> None:
        request = self.running.pop(name, None)
        if request is None:
            return
        assert request.release is not None
        for _ in range(1 + twice):
            self.admission.release(request.release)

    @rule(data=st.data(), refused=st.booleans())
    def fail(self, data: st.DataObject, refused: bool) -> None:
        """Ends without a charge."""
        ready = [name for name, request in self.running.items() if request.release is None]
        if ready:
            name = data.draw(st.sampled_from(ready))
            del self.running[name]
            self.admission.release(Release(name, 0, 0, refused=refused))

    @rule(data=st.data(), charged=st.booleans())
    def gateway_dies(self, data: st.DataObject, charged: bool) -> None:
        """The replica settles, the state reaches the limiter, and only then the lease expires."""
        ready = [name for name, request in self.running.items() if request.release is None]
        if ready:
            request = self.running.pop(data.draw(st.sampled_from(ready)))
            if charged:
                self.charge(request.cost(request.grant.max_tokens))
            self.admission.apply(self.state())

    @rule(seconds=st.floats(0.1, LEASE_S - 0.1))
    def time_passes(self, seconds: float) -> None:
        unknown = self.admission.renew(Renew("g", tuple(self.running)))
        assert unknown == ()
        self.now += seconds
        self.admission.expire()

    @rule(die=st.integers(0, 9))
    def limiter_restarts(self, die: int) -> None:
        if die < 9:  # seldom, because it makes the limiter forget what earlier steps have built up
            return
        self.start(recovery_s=1.0)
        for name in self.admission.renew(Renew("g", tuple(self.running))):
            request = self.running[name]
            grant = request.grant
            prices = request.ask.prompt_price, request.ask.output_price
            hold = OpenHold(name, "a", "k", grant.hold, grant.tokens_charged, *prices, grant.max_tokens)
            self.admission.announce(hold, "g")
        self.now += 1.0

    @invariant()
    def never_overdrawn(self) -> None:
        assert self.balance == self.deposits - self.charges >= 0

    def outstanding(self) -> int:
        """What the requests that run may still cost."""
        return sum(r.cost(r.grant.max_tokens) for r in self.running.values() if r.release is None)

    @invariant()
    def all_that_is_admitted_can_be_paid(self) -> None:
        assert self.outstanding() <= self.balance

    @invariant()
    def the_limiter_never_thinks_there_is_more_than_there_is(self) -> None:
        account = self.admission._accounts.get("a")
        if account is not None and account.balance is not None:
            assert account.free <= self.balance - self.outstanding()

    @invariant()
    def one_slot_for_each_open_request(self) -> None:
        assert self.admission.status("a").open_requests >= len(self.running)
        assert self.admission.status("a").held >= sum(r.grant.hold for r in self.running.values())

    def teardown(self) -> None:
        for name, request in self.running.items():
            self.admission.release(request.release or Release(name, 0, 0))
        self.now += 2 * LEASE_S
        self.admission.expire()
        assert (self.admission.status("a").held, self.admission.status("a").open_requests) == (0, 0)
        assert len(self.admission._open_holds) == 0


TestMoney = Money.TestCase
TestMoney.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_lives() -> None:
    run_state_machine_as_test(Money, settings=settings(Money.TestCase.settings, max_examples=150))
