"""Ledgers that are copies of one, for tests of what is around a ledger: with the schema, an account and its key."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from serve_app.accounting.database import Database
from serve_app.contracts import key_format as keys
from tests.accounting.books import Ledger

SECRET = b"secret key of the tests"
NANO = 10**9


@dataclass(frozen=True)
class Template:
    """The file of a ledger with one account, which has credit and a key."""

    file: bytes
    account_id: str
    key: str


def open_new(path: Path) -> Ledger:
    """A copy of the template. Its schema is of this release and not looked at."""
    path.write_bytes(template().file)
    with mock.patch.object(Database, "migrate"):
        return Ledger(f"sqlite:///{path}")


@cache
def template() -> Template:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        ledger = Ledger(f"sqlite:///{path}")
        account_id, key = new_account(ledger)
        ledger.close()
        return Template(path.read_bytes(), account_id, key)


def new_account(ledger: Ledger, credit: int = NANO, **limits: int) -> tuple[str, str]:
    """An account with a key: its id and the key."""
    account = ledger.create_account("Ada")
    if credit:
        ledger.credit(account.account_id, credit)
    if limits:
        ledger.set_limits(account.account_id, **limits)
    key = keys.new_key()
    ledger.create_key(account.account_id, "main", keys.digest(key), keys.hint(key))
    return account.account_id, key
