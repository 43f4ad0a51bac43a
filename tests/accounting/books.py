"""A ledger with a funded account, and settlements for it; also run as a process of its own, to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL

from serve_app.accounting import ledger as accounting
from serve_app.accounting.database import Database
from serve_app.contracts import commands
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import (
    AccountSnapshot,
    Audit,
    CheckReport,
    Difference,
    KeySnapshot,
    Outcome,
    Settled,
    Settlement,
    UsageRow,
)
from serve_app.contracts.money import Price

SECRET = "a server secret for tests"
PRICE = Price(input=3, cached_input=1, output=5)
NOON = 1_780_315_200.0  # 2026-06-01 12:00:00 UTC


class Clock:
    """Returns the Unix time that the test has set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def complete(run: Callable[[commands.CheckBooks], CheckReport], wanted: commands.CheckBooks) -> CheckReport:
    """The answers to a check, to its end, as one."""
    found: tuple[Difference, ...] = ()
    while True:
        report = run(wanted)
        found += report.differences
        if report.next is None:
            return replace(report, differences=found)
        wanted = replace(wanted, after=report.next)


def _runs(command: type[Any]) -> Any:
    def call(self: Ledger, *values: Any, **fields: Any) -> Any:
        return self.run(command(*values, **fields))

    return call


#: Bounds of a ledger's calls that a slow machine keeps.
PATIENT: dict[str, Any] = {"wait_s": 60.0, "timeout_s": 90.0}

_first_engines: dict[str, Engine] = {}  # of the process, by dialect


def patient_database(url: str) -> Database:
    return Database(url, **PATIENT)


def _do_not_flush(connection: Any, _record: Any = None) -> None:
    connection.execute("PRAGMA synchronous = OFF")


class Ledger(accounting.Ledger):
    """The ledger, with a short call for each command. It is patient, and opens and commits fast.

    All ledgers of a process share their compiled statements. SQLite does not wait for the disk: tests kill processes
    and no machine.
    """

    def __init__(self, url: str | URL, **more: Any) -> None:
        super().__init__(url, **PATIENT | more)
        database = self._database
        name = database.engine.dialect.name
        first = _first_engines.setdefault(name, database.engine)
        for engine in (database.engine, database._reads):
            engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
        if name == "sqlite":
            event.listen(database.engine, "connect", _do_not_flush)
            raw = database.engine.raw_connection()
            _do_not_flush(raw.driver_connection)
            raw.close()

    def find_key(self, digest: str) -> tuple[KeySnapshot, AccountSnapshot] | None:
        return self.run(commands.FindKeys((digest,))).get(digest)

    create_account = _runs(commands.OpenAccount)
    get_account = _runs(commands.GetAccount)
    list_accounts = _runs(commands.ListAccounts)
    set_active = _runs(commands.SetActive)
    credit = _runs(commands.AddCredit)
    correct = _runs(commands.CorrectBalance)
    grants = _runs(commands.ListGrants)
    take_back = _runs(commands.TakeBackGrant)
    expire_grants = _runs(commands.ExpireGrants)
    revoke_key = _runs(commands.RevokeKey)
    list_keys = _runs(commands.ListKeys)
    changes = _runs(commands.ReadChanges)
    usage = _runs(commands.SumUsage)
    export_usage = _runs(commands.ListUsage)
    find_reply = _runs(commands.FindReply)
    prune_replies = _runs(commands.PruneReplies)
    audit_log = _runs(commands.ListAudit)
    stuck = _runs(commands.ListStuck)
    retry_stuck = _runs(commands.RetryStuck)
    find_unsettled = _runs(commands.FindUnsettled)

    def check(self, *, full: bool = True) -> CheckReport:
        """A whole check, with the differences of all its steps."""
        return complete(self.run, commands.CheckBooks(full))

    def set_limits(self, account_id: str, *, audit: Audit | None = None, **changes: int | None) -> AccountSnapshot:
        return self.run(commands.SetLimits(account_id, changes, audit))

    def create_key(
        self, account_id: str, name: str, digest: str, hint: str, *, audit: Audit | None = None, **terms: Any
    ) -> KeySnapshot:
        return self.run(commands.CreateKey(account_id, name, digest, hint, terms, audit))

    def update_key(self, key_id: str, *, audit: Audit | None = None, **changes: Any) -> KeySnapshot:
        return self.run(commands.UpdateKey(key_id, changes, audit))

    def account_totals(self, account_id: str) -> UsageRow:
        """The total usage of an account."""
        return (self.run(commands.SumUsage(account_id)) or [UsageRow(0, 0, 0, 0, 0)])[0]


class Books:
    """One account of `ledger` with `top_up` nano-units, and a key."""

    def __init__(self, ledger: Ledger, *, top_up: int = 10**12, name: str = "Ada") -> None:
        self.ledger = ledger
        self.account_id = ledger.create_account(name).account_id
        if top_up:
            ledger.credit(self.account_id, top_up)
        self.key_id = self.new_key().key_id

    @classmethod
    def of(cls, ledger: Ledger, account_id: str, key_id: str) -> Books:
        """An existing account with a key."""
        books = cls.__new__(cls)
        books.ledger, books.account_id, books.key_id = ledger, account_id, key_id
        return books

    def new_key(self, account_id: str | None = None, **limits: Any) -> Any:
        key = keys.new_key()
        digest = keys.digest(key)
        return self.ledger.create_key(account_id or self.account_id, "main", digest, keys.hint(key), **limits)

    def key(self, key_id: str | None = None) -> Any:
        """A key of the account as the ledger lists it."""
        (found,) = (one for one in self.ledger.list_keys(self.account_id) if one.key_id == (key_id or self.key_id))
        return found

    def settlement(self, request_id: str, **changed: Any) -> Settlement:
        """Costs 8 × 3 + 2 × 1 + 4 × 5 = 46 nano-units."""
        return settlement(**{"request_id": request_id, "account_id": self.account_id, "key_id": self.key_id} | changed)

    @property
    def account(self) -> Any:
        return self.ledger.get_account(self.account_id)


COST = 46


def settlement(request_id: str, account_id: str, key_id: str, **changed: Any) -> Settlement:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "account_id": account_id,
        "key_id": key_id,
        "model": "svc-chat",
        "backend": "smollm2",
        "price": PRICE,
        "prompt_tokens": 10,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "outcome": Outcome.COMPLETED,
        "started_at": NOON - 1,
        "finished_at": NOON,
    }
    return Settlement(**fields | changed)


def start(*arguments: str) -> subprocess.Popen[str]:
    """This module's `main` in a process of its own; it reads a pipe and not the test's own input."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.accounting.books", *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def settle_in_turns(
    url: str, count: int, owners: Sequence[str], when_all_are_ready: Callable[[], object]
) -> Iterator[Settled]:
    """Settles `count` requests of each owner, account:key:prefix, some at a time."""
    wanted = [
        settlement(f"{prefix}{number}", account_id, key_id)
        for number in range(count)
        for account_id, key_id, prefix in (owner.split(":") for owner in owners)
    ]
    with Ledger(url) as ledger:
        when_all_are_ready()
        for first in range(0, len(wanted), 7):
            for one in ledger.settle(wanted[first : first + 7]):
                assert isinstance(one, Settled)
                yield one


def main(what: str, *arguments: str) -> None:
    if what == "settle":  # url account key prefix count batch: settle, and print each request id once it is durable
        url, account_id, key_id, prefix, count, batch = arguments
        with Ledger(url) as ledger:
            for first in range(0, int(count), int(batch)):
                ids = [f"{prefix}{number}" for number in range(first, min(first + int(batch), int(count)))]
                ledger.settle([settlement(one, account_id, key_id) for one in ids])
                print(" ".join(ids), flush=True)
    elif what == "shard":  # url count owners…: settle for all of them in turns, print each answer
        url, count, *owners = arguments
        for one in settle_in_turns(url, int(count), owners, sys.stdin.readline):
            print(one.request_id, one.charged, int(one.duplicate), one.version, one.balance, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
