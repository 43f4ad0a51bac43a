"""Several accounting processes write to one ledger at once, and it stays exact."""

from __future__ import annotations

from collections import defaultdict

from serve_app.accounting.database import Database

from .books import COST, Books, Ledger, start

PROCESSES = 3
REQUESTS = 60


def test_three_processes_settle_at_once_and_every_account_stays_exact(ledger: Ledger, url: str) -> None:
    """Each process has its own accounts, as shards do. All also settle the same requests of one shared account."""
    own = [Books(ledger, top_up=10**6, name=f"shard {number}") for number in range(PROCESSES)]
    shared = Books(ledger, top_up=10**6, name="shared")
    budgeted = shared.new_key(budget=10**6, budget_period="month").key_id
    ledger.credit(shared.account_id, 10 * COST + 1, "grant")
    for books in own:
        ledger.credit(books.account_id, 10 * COST, "grant", expires_at=4e9)
        ledger.credit(books.account_id, 10 * COST, "grant", expires_at=3e9)
    running = [
        start(
            "shard",
            url,
            str(REQUESTS),
            "7",
            f"{books.account_id}:{books.key_id}:own{number}-",
            f"{shared.account_id}:{budgeted}:shared-",
        )
        for number, books in enumerate(own)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in running:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        answers += [line.split() for line in printed.splitlines()]

    assert len(answers) == PROCESSES * 2 * REQUESTS
    first = [line for line in answers if line[2] == "0"]
    assert len({line[0] for line in first}) == len(first) == (PROCESSES + 1) * REQUESTS
    assert {line[1] for line in answers} == {str(COST)}
    for number, books in enumerate(own):
        assert books.account.balance == 10**6 + 20 * COST - REQUESTS * COST
        assert [grant.left for grant in ledger.grants(books.account_id)] == [0, 0]
        balances = [int(line[4]) for line in answers if line[0].startswith(f"own{number}-")]
        assert balances == sorted(balances, reverse=True)
    assert shared.account.balance == 10**6 + 10 * COST + 1 - REQUESTS * COST
    assert [grant.left for grant in ledger.grants(shared.account_id)] == [0]
    assert ledger.account_totals(shared.account_id).requests == REQUESTS

    # Each version has one balance, from every process: the limiter trusts the highest.
    by_version = defaultdict(set)
    for line in answers:
        by_version[line[0].rsplit("-", 1)[0], int(line[3])].add(line[4])
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
