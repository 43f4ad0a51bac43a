"""An API key has a checksum against typing errors, and is not stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from serve_app.accounting import api_keys
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import KeySnapshot
from serve_app.contracts.errors import Conflict, InvalidValue, KeyNotFound

from .books import Books, Clock

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def test_a_new_key_is_well_formed_and_its_own() -> None:
    made = {keys.new_key() for _ in range(1000)}
    assert len(made) == 1000
    assert all(keys.well_formed(key) and key.startswith("sk-") for key in made)


@given(position=st.integers(3, 51), replacement=st.sampled_from(ALPHABET))
def test_the_checksum_catches_every_wrong_character(position: int, replacement: str) -> None:
    key = keys.new_key()
    typo = key[:position] + replacement + key[position + 1 :]
    assert keys.well_formed(typo) == (typo == key)


@given(position=st.integers(3, 50))
def test_the_checksum_catches_swapped_neighbours(position: int) -> None:
    key = keys.new_key()
    typo = key[:position] + key[position + 1] + key[position] + key[position + 2 :]
    assert keys.well_formed(typo) == (typo == key)


@given(st.text(max_size=60))
def test_other_text_is_no_key(text: str) -> None:
    assert not keys.well_formed(text)
    assert not keys.well_formed(keys.new_key() + "\n")


def test_a_key_is_found_by_its_digest_and_stays_found_when_revoked(books: Books) -> None:
    digest = keys.digest(keys.new_key())
    assert books.ledger.find_key(digest) is None
    key = books.ledger.create_key(books.account_id, "laptop", digest, "sk-abcd…wxyz")
    assert books.ledger.find_key(digest) == (key, books.account)

    revoked = books.ledger.revoke_key(key.key_id)
    assert not revoked.active
    assert revoked.version > key.version
    assert books.ledger.revoke_key(key.key_id) == revoked
    assert books.ledger.find_key(digest) == (revoked, books.account)
    assert revoked in books.ledger.list_keys(books.account_id)
    with pytest.raises(KeyNotFound):
        books.ledger.revoke_key("key_none")


def test_an_account_has_a_bounded_number_of_keys_that_work(
    timed: Books, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(name: str, **terms: Any) -> KeySnapshot:
        return timed.ledger.create_key(timed.account_id, name, keys.digest(name), "sk-…", **terms)

    monkeypatch.setattr(api_keys, "MAX_KEYS", 4)  # one is there
    first, *_ = create("a"), create("b"), create("for an hour", expires_at=clock.now + 3600)
    with pytest.raises(Conflict, match="revoke unused keys"):
        create("c")
    assert create("a") == first  # a repetition
    timed.ledger.revoke_key(first.key_id)
    create("c")
    clock.now += 3600
    create("d")
    with pytest.raises(Conflict, match="revoke unused keys"):
        create("e")


def test_creating_the_same_key_again_returns_the_same_key(books: Books) -> None:
    digest = keys.digest(keys.new_key())
    key = books.ledger.create_key(books.account_id, "laptop", digest, "sk-…")
    assert books.ledger.create_key(books.account_id, "laptop", digest, "sk-…") == key
    with pytest.raises(Conflict):
        books.ledger.create_key(books.ledger.create_account("B").account_id, "laptop", digest, "sk-…")


def test_a_key_itself_cannot_be_stored_by_mistake(books: Books) -> None:
    with pytest.raises(InvalidValue, match="digest"):
        books.ledger.create_key(books.account_id, "laptop", keys.new_key(), "sk-…")


def test_the_database_does_not_contain_the_key(books: Books, url: str, tmp_path: Path) -> None:
    key = keys.new_key()
    books.ledger.create_key(books.account_id, "laptop", keys.digest(key), keys.hint(key))
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT * FROM api_keys")).all()
    engine.dispose()
    assert key not in str(rows)
    assert key[7:-4] not in str(rows)
