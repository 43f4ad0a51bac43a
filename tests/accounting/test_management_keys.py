"""Management keys are of one account, stored without the key, and found by their digests."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue, KeyNotFound
from serve_app.contracts.key_format import MANAGEMENT, digest, hint, new_key, well_formed
from serve_app.contracts.management import (
    CreateManagementKey,
    FindManagementKey,
    ListManagementKeys,
    ManagementKey,
    RevokeManagementKey,
)

from .books import NOON, Books, Clock


def create(books: Books, key: str, **changed: Any) -> ManagementKey:
    fields = {"name": "robot", "digest": digest(key), "hint": hint(key), **changed}
    return books.ledger.run(CreateManagementKey(fields.pop("account_id", books.account_id), **fields))


def test_a_key_is_found_by_its_digest_whatever_its_state(timed: Books, clock: Clock) -> None:
    run, key = timed.ledger.run, new_key(MANAGEMENT)
    made = create(timed, key, expires_at=NOON + 60)
    assert create(timed, key, expires_at=NOON + 60) == made
    assert run(FindManagementKey(digest(key))) == (made, timed.ledger.get_account(timed.account_id))
    clock.now += 120
    timed.ledger.set_active(timed.account_id, False)
    revoked = run(RevokeManagementKey(timed.account_id, made.key_id))
    assert revoked == run(RevokeManagementKey(timed.account_id, made.key_id))
    assert revoked.revoked_at == NOON + 120
    assert run(ListManagementKeys(timed.account_id)) == [revoked]
    found = run(FindManagementKey(digest(key)))
    assert found is not None
    assert (found[0], found[1].active) == (revoked, False)
    assert run(FindManagementKey(digest(new_key(MANAGEMENT)))) is None
    assert run(FindManagementKey("a\0b")) is None


def test_a_key_is_of_its_account(timed: Books) -> None:
    other = timed.ledger.create_account("Bob's").account_id
    key = new_key(MANAGEMENT)
    made = create(timed, key)
    assert timed.ledger.run(ListManagementKeys(other)) == []
    with pytest.raises(KeyNotFound):
        timed.ledger.run(RevokeManagementKey(other, made.key_id))
    with pytest.raises(Conflict):
        create(timed, key, account_id=other)
    assert timed.ledger.run(ListManagementKeys(timed.account_id)) == [made]


def test_what_is_no_management_key_is_refused(timed: Books) -> None:
    wrong: list[dict[str, Any]] = [{"name": ""}, {"digest": "mk-x"}, {"expires_at": NOON}, {"hint": "x" * 41}]
    for changed in wrong:
        with pytest.raises(InvalidValue):
            create(timed, new_key(MANAGEMENT), **changed)
    with pytest.raises(AccountNotFound):
        create(timed, new_key(MANAGEMENT), account_id="acct_none")


def test_the_two_kinds_of_keys_are_told_apart() -> None:
    assert well_formed(new_key())
    assert well_formed(new_key(MANAGEMENT), MANAGEMENT)
    assert not well_formed(new_key(MANAGEMENT))
    assert not well_formed(new_key(), MANAGEMENT)
    assert new_key(bits=7) == new_key(bits=7) != new_key(bits=8)
    assert well_formed(new_key(bits=2**256 - 1))
