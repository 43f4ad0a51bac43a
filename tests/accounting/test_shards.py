"""Several shards of accounting write to one ledger at once, and it stays exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from serve_app.accounting.database import Database
from serve_app.contracts.books import Settled

from .books import COST, Books, Ledger, settle_in_turns, start

SHARDS = 3
REQUESTS = 60


def in_threads(url: str, owners: list[list[str]]) -> list[Settled]:
    """Each has its own connections."""
    ready = Barrier(len(owners))
    with ThreadPoolExecutor(len(owners)) as pool:
        running = [
            pool.submit(lambda mine: list(settle_in_turns(url, REQUESTS, mine, lambda: ready.wait(60))), mine)
            for mine in owners
        ]
        return [one for answers in running for one in answers.result()]


def in_processes(url: str, owners: list[list[str]]) -> list[Settled]:
    running = [start("shard", url, str(REQUESTS), *mine) for mine in owners]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in running:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        for request_id, *numbers in map(str.split, printed.splitlines()):
            charged, duplicate, version, balance = map(int, numbers)
            answers.append(Settled(request_id, charged, balance, version, bool(duplicate)))
    return answers


@pytest.mark.parametrize("run", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
def test_three_shards_settle_at_once_and_every_account_stays_exact(
    ledger: Ledger, url: str, run: Callable[[str, list[list[str]]], list[Settled]]
) -> None:
    """Each has its own accounts. All also settle the same requests of one shared account."""
    own = [Books(ledger, top_up=10**6, name=f"shard {number}") for number in range(SHARDS)]
    shared = Books(ledger, top_up=10**6, name="shared")
    budgeted = shared.new_key(budget=10**6, budget_period="month").key_id
    ledger.credit(shared.account_id, 10 * COST + 1, "grant")
    for books in own:
        ledger.credit(books.account_id, 10 * COST, "grant", expires_at=4e9)
        ledger.credit(books.account_id, 10 * COST, "grant", expires_at=3e9)
    of_shared = f"{shared.account_id}:{budgeted}:shared-"
    owners = [[f"{books.account_id}:{books.key_id}:own{number}-", of_shared] for number, books in enumerate(own)]
    answers = run(url, owners)

    assert len(answers) == SHARDS * 2 * REQUESTS
    first = [one.request_id for one in answers if not one.duplicate]
    assert len(set(first)) == len(first) == (SHARDS + 1) * REQUESTS
    assert {one.charged for one in answers} == {COST}
    for number, books in enumerate(own):
        assert books.account.balance == 10**6 + 20 * COST - REQUESTS * COST
        assert [grant.left for grant in ledger.grants(books.account_id)] == [0, 0]
        balances = [one.balance for one in answers if one.request_id.startswith(f"own{number}-")]
        assert balances == sorted(balances, reverse=True)
    assert shared.account.balance == 10**6 + 10 * COST + 1 - REQUESTS * COST
    assert [grant.left for grant in ledger.grants(shared.account_id)] == [0]
    assert ledger.account_totals(shared.account_id).requests == REQUESTS

    # Each version has one balance, from every shard: the limiter trusts the highest.
    by_version = defaultdict(set)
    for one in answers:
        by_version[one.request_id.rsplit("-", 1)[0], one.version].add(one.balance)
    assert all(len(balances) == 1 for balances in by_version.values())
    assert ledger.check().differences == ()


def test_a_writer_waits_for_the_others_of_its_machine(url: str) -> None:
    """The bounds that make several writers safe are set on every connection."""
    database = Database(url, wait_s=7)
    with database.engine.connect() as connection:
        if url.startswith("sqlite"):
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 7000
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        else:
            assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    database.close()
