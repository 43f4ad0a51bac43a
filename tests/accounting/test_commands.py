"""Every command has one function of its name; texts that no row can hold find nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from serve_app.accounting.registry import READS, STEPS, WRITES
from serve_app.contracts import (
    billing,
    commands,
    management,
    notices,
    operators,
    payments,
    people,
    recharges,
    sealed_secrets,
    served_commands,
    sign_in,
)
from serve_app.contracts.commands import Command
from serve_app.contracts.errors import AccountNotFound, InvalidValue, KeyNotFound

from .books import Books

SQLITE_AND_POSTGRESQL_DIFFER = ["\0", "a\0b", "\ud800"]  # PostgreSQL takes none of these, not even in a comparison


def test_each_command_has_one_function_that_is_named_after_it() -> None:
    files = (
        commands,
        served_commands,
        sign_in,
        people,
        management,
        notices,
        operators,
        payments,
        recharges,
        sealed_secrets,
        billing,
    )
    declared = {name: value for file in files for name, value in vars(file).items()}
    classes = [value for value in declared.values() if isinstance(value, type) and issubclass(value, Command)]
    # A retry of what is stuck settles, like Ledger.settle, and is one of its methods.
    functions = {command: reading.run for command, reading in READS.items()} | WRITES | STEPS
    assert functions.keys() == set(classes) - {Command, commands.RetryStuck}
    assert len(READS) + len(WRITES) + len(STEPS) == len(functions)
    for command, function in functions.items():
        assert function.__name__.replace("_", "") == command.__name__.lower()
        hints = get_type_hints(function)
        assert command in hints.values()
        (base,) = command.__orig_bases__  # type: ignore[attr-defined]
        assert hints["return"] == base.__args__[0], command


def test_a_text_that_no_row_can_hold_finds_nothing(books: Books) -> None:
    books.ledger.settle([books.settlement("r1")])
    for text in SQLITE_AND_POSTGRESQL_DIFFER:
        assert_finds_nothing(books, text)
    assert books.ledger.check().ok


def assert_finds_nothing(books: Books, text: str) -> None:
    ledger = books.ledger
    lookups: list[Callable[[], Any]] = [
        lambda: ledger.get_account(text),
        lambda: ledger.list_accounts(after=text),
        lambda: ledger.list_keys(text),
        lambda: ledger.grants(text),
        lambda: ledger.take_back(text, 1, memo="m"),
        lambda: ledger.set_active(text, False),
        lambda: ledger.set_limits(text, rpm=1),
        lambda: ledger.credit(text, 1),
        lambda: ledger.credit(text, 1, idempotency_key="k"),
        lambda: ledger.correct(text, 1, memo="m"),
        lambda: books.new_key(text),
    ]
    for look_up in lookups:
        with pytest.raises(AccountNotFound):
            look_up()
    for look_up in (lambda: ledger.update_key(text, rpm=1), lambda: ledger.revoke_key(text)):
        with pytest.raises(KeyNotFound):
            look_up()
    for field in ("account_id", "key_id", "model"):
        assert ledger.usage(**{field: text}) == []
        assert ledger.export_usage(**{field: text}).rows == ()
    assert ledger.audit_log(account_id=text) == []
    assert ledger.find_key(text) is None
    assert ledger.find_reply(text, "key") is None
    assert ledger.find_reply(books.account_id, text) is None


def test_a_place_in_an_export_that_no_row_can_have_is_refused(books: Books) -> None:
    texts = SQLITE_AND_POSTGRESQL_DIFFER
    for place in [place for text in texts for place in ([text, 1.0, "r1"], ["acct_1", 1.0, text])]:
        cursor = base64.urlsafe_b64encode(json.dumps(place).encode()).decode()
        with pytest.raises(InvalidValue, match="invalid `after`"):
            books.ledger.export_usage(after=cursor)


def test_only_fields_that_exist_can_be_changed(books: Books) -> None:
    for change in (
        lambda: books.ledger.run(commands.SetLimits(books.account_id, {"granted": 5})),
        lambda: books.ledger.run(commands.UpdateKey(books.key_id, {"digest": "0"})),
        lambda: books.new_key(active=False),
    ):
        with pytest.raises(InvalidValue, match="no field"):
            change()
