"""Whatever is done, in whatever order, the books balance and agree with a model of a few lines."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serve_app.ledger import InsufficientBalance, Ledger, Outcome, Price, Settled

from .books import Books

prices = st.builds(Price, *[st.integers(0, 20)] * 3)
outcomes = st.sampled_from(Outcome)


class Accounts(RuleBasedStateMachine):
    """Creates, credits, corrects, settles, repeats and restarts."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(self.template, self.folder / "ledger.db")
        self.url = f"sqlite:///{self.folder}/ledger.db"
        self.ledger = Ledger(self.url, migrate=False)
        self.books: list[Books] = []
        self.granted: Counter[str] = Counter()
        self.topped_up: Counter[str] = Counter()
        self.charged: dict[str, int] = {}
        self.by_account: Counter[str] = Counter()
        self.version = 0

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)

    def pick(self, number: int) -> Books:
        books = self.books[number % len(self.books)]
        books.ledger = self.ledger
        return books

    @rule()
    def create(self) -> None:
        if len(self.books) < 3:
            self.books.append(Books(self.ledger, top_up=0))

    @precondition(lambda self: self.books)
    @rule(number=st.integers(0, 2), amount=st.integers(1, 500), kind=st.sampled_from(["grant", "top_up"]))
    def credit(self, number: int, amount: int, kind: str) -> None:
        account_id = self.pick(number).account_id
        self.ledger.credit(account_id, amount, kind)  # type: ignore[arg-type]
        (self.granted if kind == "grant" else self.topped_up)[account_id] += amount

    @precondition(lambda self: self.books)
    @rule(number=st.integers(0, 2), amount=st.integers(-300, 100).filter(bool))
    def correct(self, number: int, amount: int) -> None:
        account_id = self.pick(number).account_id
        try:
            self.ledger.correct(account_id, amount, memo="test")
        except InsufficientBalance:
            assert self.topped_up[account_id] + amount < 0
        else:
            self.topped_up[account_id] += amount

    @precondition(lambda self: self.books)
    @rule(
        batch=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 15), prices, outcomes), max_size=6
        )
    )
    def settle(self, batch: list[tuple[int, int, int, Price, Outcome]]) -> None:
        """Request ids come from a small set for each account, so that many are duplicates."""
        settlements = []
        for number, request, tokens, price, outcome in batch:
            books = self.pick(number)
            settlements.append(
                books.settlement(
                    f"{books.account_id}-{request}",
                    price=price,
                    prompt_tokens=tokens + 3,
                    cached_tokens=tokens // 2,
                    completion_tokens=tokens,
                    outcome=outcome,
                    finished_at=1_780_000_000.0 + 40_000 * (request % 5),
                )
            )
        results = self.ledger.settle(settlements)
        for settlement, result in zip(settlements, results, strict=True):
            assert isinstance(result, Settled)
            name, account_id = settlement.request_id, settlement.account_id
            assert result.duplicate == (name in self.charged)
            if name not in self.charged:
                cost = settlement.price.charge(
                    settlement.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens
                )
                nothing = settlement.outcome is Outcome.CANCELLED and not settlement.completion_tokens
                if settlement.outcome is Outcome.FAILED or nothing:
                    cost = 0
                grant = min(cost, self.granted[account_id])
                paid = min(cost - grant, self.topped_up[account_id])
                self.granted[account_id] -= grant
                self.topped_up[account_id] -= paid
                self.charged[name] = grant + paid
                self.by_account[account_id] += 1
            assert result.charged == self.charged[name]
        for result, settlement in zip(results, settlements, strict=True):
            account_id = settlement.account_id
            assert result.balance == self.granted[account_id] + self.topped_up[account_id]

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.url)

    @invariant()
    def books_balance(self) -> None:
        report = self.ledger.check()
        assert report.ok, report.differences

    @invariant()
    def accounts_agree_with_the_model(self) -> None:
        changes = self.ledger.changes(0)
        assert changes.version >= self.version
        self.version = changes.version
        for account in changes.accounts:
            expected = self.granted[account.account_id], self.topped_up[account.account_id]
            assert (account.granted, account.topped_up) == expected
            totals = self.ledger.account_totals(account.account_id)
            assert totals.requests == self.by_account[account.account_id]
        assert sum(row.charged for row in self.ledger.usage()) == sum(self.charged.values())


def test_the_books_balance_whatever_happens(sqlite_template: Path) -> None:
    Accounts.template = sqlite_template
    run_state_machine_as_test(
        Accounts,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
