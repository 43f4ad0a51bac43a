"""Tests that each operator's change is on the audit log, in the same transaction, and that no secret is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import InsufficientBalance, InvalidValue

from .books import NOON, SECRET, Books, Clock, Ledger

OPERATOR = Audit("cli:ada", "req-7", "192.0.2.1")


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    with Ledger(url, now=clock) as opened:
        yield opened


def test_every_change_of_an_operator_is_on_the_log_newest_first(ledger: Ledger, clock: Clock) -> None:
    account_id = ledger.create_account("Ada", audit=OPERATOR).account_id
    ledger.set_limits(account_id, rpm=5, weight=200, audit=OPERATOR)
    ledger.set_active(account_id, False, audit=OPERATOR)
    clock.now += 1
    ledger.credit(account_id, 500, "grant", memo="welcome", expires_at=NOON + 60, audit=OPERATOR)
    ledger.credit(account_id, 70, audit=Audit("billing"))
    ledger.correct(account_id, -20, memo="ticket 7", audit=OPERATOR)
    digest = keys.digest(keys.new_key())
    key_id = ledger.create_key(account_id, "laptop", digest, "sk-…", models=("m",), rpm=3, audit=OPERATOR).key_id
    ledger.update_key(key_id, rpm=None, budget=9, budget_period="day", audit=OPERATOR)
    ledger.revoke_key(key_id, audit=OPERATOR)

    log = ledger.audit_log()
    assert [one.audit_id for one in log] == list(range(9, 0, -1))
    assert [(one.action, one.subject, one.detail) for one in reversed(log)] == [
        ("create_account", account_id, {"name": "Ada", "currency": "USD"}),
        ("set_limits", account_id, {"rpm": {"was": None, "is": 5}, "weight": {"was": None, "is": 200}}),
        ("set_active", account_id, {"active": {"was": True, "is": False}}),
        (
            "credit",
            account_id,
            {"entry": 1, "kind": "grant", "amount": 500, "memo": "welcome", "expires_at": NOON + 60},
        ),
        ("credit", account_id, {"entry": 2, "kind": "top_up", "amount": 70, "memo": "", "expires_at": None}),
        ("correct", account_id, {"entry": 3, "amount": -20, "memo": "ticket 7"}),
        ("create_key", key_id, {"name": "laptop", "models": ["m"], "rpm": 3}),
        (
            "update_key",
            key_id,
            {
                "rpm": {"was": 3, "is": None},
                "budget": {"was": None, "is": 9},
                "budget_period": {"was": None, "is": "day"},
            },
        ),
        ("revoke_key", key_id, {"active": {"was": True, "is": False}}),
    ]
    assert {one.account_id for one in log} == {account_id}
    assert (log[0].actor, log[0].request_id, log[0].address) == ("cli:ada", "req-7", "192.0.2.1")
    assert (log[4].actor, log[4].request_id, log[4].address) == ("billing", None, None)
    assert [log[0].at, log[-1].at] == [NOON + 1, NOON]
    assert ledger.check().ok


def test_the_log_comes_in_pages_and_by_account(ledger: Ledger) -> None:
    first = ledger.create_account("A", audit=OPERATOR).account_id
    second = ledger.create_account("B", audit=OPERATOR).account_id
    for number in range(4):
        ledger.credit((first, second)[number % 2], 1 + number, audit=OPERATOR)
    assert [one.audit_id for one in ledger.audit_log(limit=4)] == [6, 5, 4, 3]
    assert [one.audit_id for one in ledger.audit_log(limit=4, after=3)] == [2, 1]
    assert [one.audit_id for one in ledger.audit_log(account_id=second)] == [6, 4, 2]
    assert [one.audit_id for one in ledger.audit_log(account_id=second, after=4)] == [2]
    assert ledger.audit_log(account_id="acct_none") == []
    with pytest.raises(InvalidValue):
        ledger.audit_log(limit=0)


def test_what_changes_nothing_is_not_logged(ledger: Ledger) -> None:
    books = Books(ledger, top_up=100)
    ledger.credit(books.account_id, 5, idempotency_key="p1", audit=OPERATOR)
    log = ledger.audit_log()
    ledger.credit(books.account_id, 5, idempotency_key="p1", audit=OPERATOR)
    ledger.set_limits(books.account_id, rpm=None, audit=OPERATOR)
    ledger.set_active(books.account_id, True, audit=OPERATOR)
    ledger.update_key(books.key_id, name="main", audit=OPERATOR)
    with pytest.raises(InsufficientBalance):
        ledger.correct(books.account_id, -1000, memo="too much", audit=OPERATOR)
    assert ledger.audit_log() == log
    assert len(log) == 1  # a change without an operator's name is not on the log
    assert ledger.check().ok


def test_a_change_that_cannot_be_logged_does_not_happen(ledger: Ledger) -> None:
    books = Books(ledger, top_up=0)
    before = books.account
    for wrong in (Audit(""), Audit("a\nb"), Audit("x" * 201), Audit("ada", "a\0b"), Audit("ada", None, "")):
        with pytest.raises(InvalidValue):
            ledger.credit(books.account_id, 5, audit=wrong)
    assert books.account == before
    assert ledger.check().ok


def test_neither_key_nor_digest_nor_hint_is_on_the_log(ledger: Ledger) -> None:
    account_id = ledger.create_account("A", audit=OPERATOR).account_id
    key = keys.new_key()
    digest, hint = keys.digest(key), keys.hint(key)
    key_id = ledger.create_key(account_id, "laptop", digest, hint, audit=OPERATOR).key_id
    ledger.update_key(key_id, rpm=1, audit=OPERATOR)
    ledger.revoke_key(key_id, audit=OPERATOR)
    text = json.dumps([dataclasses.asdict(one) for one in ledger.audit_log()], ensure_ascii=False)
    for secret in (key, key[7:-4], digest, hint, SECRET):
        assert secret not in text
