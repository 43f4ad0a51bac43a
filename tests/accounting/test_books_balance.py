"""After any operations in any order, the books balance and agree with a small model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serve_app.accounting.funds import GRACE_S
from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.errors import InsufficientBalance
from serve_app.contracts.money import Price

from .books import NOON, Books, Clock, Ledger

HOUR = 3600
FOREVER = 0
prices = st.sampled_from([Price(3, 1, 5), Price(0, 0, 7), Price(20, 0, 1), Price(0, 0, 0)])
outcomes = st.sampled_from([Outcome.COMPLETED, Outcome.COMPLETED, Outcome.CANCELLED, Outcome.FAILED])
ages = st.sampled_from([60, 2 * HOUR, 30 * HOUR])  # of a request when it is settled, in seconds
arrivals = st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 15), prices, outcomes, ages)
lasting = st.sampled_from([FOREVER, HOUR, HOUR, 30 * HOUR])  # of a grant, in seconds


@dataclass
class Lot:
    """A grant in the model."""

    left: int
    expires_at: float  # infinite: never


@dataclass
class Model:
    """The expected state of an account."""

    books: Books
    topped_up: int = 0
    lots: list[Lot] = field(default_factory=list)
    charged: dict[str, int] = field(default_factory=dict)  # by request id
    days: Counter[str] = field(default_factory=Counter)  # charged to the key, by day
    counted: str | None = None  # the period of the key's budget

    @property
    def granted(self) -> int:
        return sum(lot.left for lot in self.lots)

    def charge(self, settlement: Settlement) -> None:
        price = settlement.price
        cost = (settlement.prompt_tokens - settlement.cached_tokens) * price.input
        cost += settlement.cached_tokens * price.cached_input + settlement.completion_tokens * price.output
        nothing = settlement.outcome is Outcome.CANCELLED and not settlement.completion_tokens
        if settlement.outcome is Outcome.FAILED or nothing:
            cost = 0
        paid = 0
        for lot in sorted(self.lots, key=lambda lot: lot.expires_at):  # sorting is stable: the oldest first
            if settlement.started_at < lot.expires_at:
                taken = min(lot.left, cost - paid)
                lot.left -= taken
                paid += taken
        taken = min(self.topped_up, cost - paid)
        self.topped_up -= taken
        self.charged[settlement.request_id] = paid + taken
        self.days[day_of(settlement.finished_at)] += paid + taken

    def spent(self, now: float) -> int:
        period = day_of(now)[: 10 if self.counted == "day" else 7]
        return sum(charged for day, charged in self.days.items() if day.startswith(period))


def day_of(at: float) -> str:
    seconds = int(at - NOON + 43_200)  # since 2026-06-01; the tests stay within a few weeks of it
    day = seconds // 86_400
    return f"2026-06-{1 + day:02}" if day >= 0 else f"2026-05-{32 + day:02}"


class Accounts(RuleBasedStateMachine):
    """Credits, grants, corrects, sets budgets, settles, repeats, expires, moves the clock and restarts."""

    new_url: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        self.url = type(self).new_url()
        self.clock = Clock(NOON)
        self.ledger = Ledger(self.url, now=self.clock)
        self.engine = sa.create_engine(self.url)  # beside the ledger's own
        self.models: list[Model] = []
        self.version = 0

    def teardown(self) -> None:
        assert self.ledger.check().differences == ()
        self.engine.dispose()
        self.ledger.close()

    def pick(self, number: int) -> Model:
        model = self.models[number % len(self.models)]
        model.books.ledger = self.ledger
        return model

    @initialize(given=st.lists(st.tuples(st.integers(20, 200), lasting), min_size=1, max_size=3))
    def open_accounts(self, given: list[tuple[int, int]]) -> None:
        for _ in range(2):
            self.models.append(Model(Books(self.ledger, top_up=0)))
        for amount, lasts in given:
            self.grant(0, amount, lasts)
        self.top_up(1, 300)

    @rule(number=st.integers(0, 1), amount=st.integers(1, 200))
    def top_up(self, number: int, amount: int) -> None:
        model = self.pick(number)
        self.ledger.credit(model.books.account_id, amount)
        model.topped_up += amount

    @rule(number=st.integers(0, 1), amount=st.integers(20, 200), lasts=lasting)
    def grant(self, number: int, amount: int, lasts: int) -> None:
        model = self.pick(number)
        expires_at = None if lasts == FOREVER else self.clock.now + lasts
        self.ledger.credit(model.books.account_id, amount, "grant", expires_at=expires_at)
        model.lots.append(Lot(amount, math.inf if expires_at is None else expires_at))

    @rule(number=st.integers(0, 1), amount=st.integers(-300, 100).filter(bool))
    def correct(self, number: int, amount: int) -> None:
        model = self.pick(number)
        try:
            self.ledger.correct(model.books.account_id, amount, memo="test")
        except InsufficientBalance:
            assert model.topped_up + amount < 0
        else:
            model.topped_up += amount

    @rule(number=st.integers(0, 1), which=st.integers(0, 5))
    def take_back(self, number: int, which: int) -> None:
        model = self.pick(number)
        if not model.lots:
            return
        which %= len(model.lots)
        grant_id = self.ledger.grants(model.books.account_id)[which].grant_id
        try:
            self.ledger.take_back(model.books.account_id, grant_id, memo="test")
        except InsufficientBalance:
            assert model.lots[which].left == 0
        else:
            model.lots[which].left = 0

    @rule(number=st.integers(0, 1), period=st.sampled_from([None, "day", "month"]))
    def set_budget(self, number: int, period: Any) -> None:
        model = self.pick(number)
        self.ledger.update_key(model.books.key_id, budget=None if period is None else 1000, budget_period=period)
        model.counted = period

    @rule(batch=st.lists(arrivals, min_size=1, max_size=5))
    def settle(self, batch: list[tuple[int, int, int, Price, Outcome, int]]) -> None:
        """Request ids come from a small set for each account, so that many are duplicates."""
        models = [self.pick(one[0]) for one in batch]
        settlements = [
            model.books.settlement(
                f"{model.books.account_id}-{request}",
                price=price,
                prompt_tokens=tokens + 3,
                cached_tokens=tokens // 2,
                completion_tokens=tokens,
                outcome=outcome,
                started_at=self.clock.now - age,
                finished_at=self.clock.now - age / 2,
            )
            for model, (_, request, tokens, price, outcome, age) in zip(models, batch, strict=True)
        ]
        results = self.ledger.settle(settlements)
        for model, settlement, result in zip(models, settlements, results, strict=True):
            assert isinstance(result, Settled)
            assert result.duplicate == (settlement.request_id in model.charged)
            if not result.duplicate:
                model.charge(settlement)
            assert result.charged == model.charged[settlement.request_id]
        for model, result in zip(models, results, strict=True):
            assert isinstance(result, Settled)
            assert result.balance == model.granted + model.topped_up
            assert result.key_spent == (None if model.counted is None else model.spent(self.clock.now))

    @rule(seconds=st.sampled_from([-5000, HOUR // 2, 2 * HOUR + 1, 20 * HOUR]), restart=st.booleans())
    def pass_time(self, seconds: int, restart: bool) -> None:
        """Expired grants are removed, and the ledger may have been opened again."""
        self.clock.now += seconds
        if restart:
            self.ledger.close()
            self.ledger = Ledger(self.url, now=self.clock)
        gone = 0
        for model in self.models:
            for lot in model.lots:
                if lot.left and lot.expires_at <= self.clock.now - GRACE_S:
                    lot.left = 0
                    gone += 1
        assert self.ledger.expire_grants() == gone
        assert self.ledger.check().differences == ()

    @invariant()
    def the_rows_add_up(self) -> None:
        """The invariants of the check, computed in another way."""
        with self.engine.connect() as connection:

            def rows(query: str) -> list[tuple[Any, ...]]:
                return [tuple(row) for row in connection.execute(sa.text(query))]

            assert rows("SELECT entry_id FROM postings GROUP BY entry_id HAVING sum(amount) <> 0") == []
            assert rows("SELECT id FROM accounts WHERE granted < 0 OR topped_up < 0") == []
            assert rows("SELECT entry_id FROM grants WHERE remaining < 0") == []
            ((held,),) = rows("SELECT coalesce(sum(granted + topped_up), 0) FROM accounts")
            ((posted,),) = rows("SELECT coalesce(sum(amount), 0) FROM postings WHERE ledger_account LIKE 'customer:%'")
            sums = "count(*), coalesce(sum(charged), 0), coalesce(sum(prompt_tokens), 0)"
            of_rows = rows(f"SELECT {sums} FROM usage")
            of_days = rows(f"SELECT {sums.replace('count(*)', 'coalesce(sum(requests), 0)')} FROM usage_daily")
        assert int(held) == int(posted) == sum(model.granted + model.topped_up for model in self.models)
        assert [int(one) for one in of_rows[0]] == [int(one) for one in of_days[0]]
        assert int(of_rows[0][0]) == sum(len(model.charged) for model in self.models)
        assert int(of_rows[0][1]) == sum(sum(model.charged.values()) for model in self.models)

    @invariant()
    def accounts_keys_and_grants_agree_with_the_model(self) -> None:
        changes = self.ledger.changes(0)
        assert changes.version >= self.version
        self.version = changes.version
        accounts = {account.account_id: account for account in changes.accounts}
        keys = {key.key_id: key for key in changes.keys}
        for model in self.models:
            account = accounts[model.books.account_id]
            assert (account.granted, account.topped_up) == (model.granted, model.topped_up)
            valid = [lot.left for lot in model.lots if lot.expires_at > self.clock.now]
            assert account.available(self.clock.now) == sum(valid) + model.topped_up
            grants = self.ledger.grants(model.books.account_id)
            assert [grant.left for grant in grants] == [lot.left for lot in model.lots]
            assert self.ledger.account_totals(model.books.account_id).requests == len(model.charged)
            spent = 0 if model.counted is None else model.spent(self.clock.now)
            assert keys[model.books.key_id].spent == spent


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=(pytest.mark.slow, pytest.mark.long))])
def test_the_books_balance_after_any_sequence_of_operations(new_url: Callable[..., str], count: int) -> None:
    def migrated() -> str:
        return new_url(migrated=True)

    Accounts.new_url = staticmethod(migrated)
    run_state_machine_as_test(
        Accounts,
        settings=settings(
            max_examples=count,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
