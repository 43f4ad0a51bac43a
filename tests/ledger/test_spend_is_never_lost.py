"""What breaks in other services' billing, as promises: nothing lost, nothing doubled, never below zero."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve_app.ledger import Ledger, LedgerUnavailable, Outcome, Settled, keys
from serve_app.ledger.group_commit import GroupCommitter
from serve_app.ledger.spool import Spool

from .books import COST, NOON, SECRET, Books, start


def test_a_process_that_is_asked_to_stop_loses_no_spend(books: Books, url: str) -> None:
    """Spend that waits in memory for a flush is lost with every SIGTERM: here an answer means that it is written."""
    process = start("settle", url, books.account_id, books.key_id, "r", "100000", "3")
    assert process.stdout is not None
    acknowledged = [name for _ in range(15) for name in process.stdout.readline().split()]
    process.send_signal(signal.SIGTERM)
    acknowledged += process.stdout.read().split()
    process.wait(30)
    recorded = {one.request_id for one in books.ledger.export_usage(account_id=books.account_id).rows}
    assert set(acknowledged) <= recorded
    assert books.account.balance == 10**12 - COST * books.ledger.account_totals(books.account_id).requests
    assert books.ledger.check().ok


def test_a_committer_that_is_closed_writes_what_waits(books: Books) -> None:
    committer = GroupCommitter(books.ledger.settle, max_batch=4)
    futures = [committer.submit(books.settlement(f"r{number}")) for number in range(30)]
    assert committer.close(30)
    assert {future.result(0).charged for future in futures} == {COST}
    assert books.ledger.account_totals(books.account_id).requests == 30


def test_the_spend_that_a_reader_sees_is_always_that_of_its_usage_rows(books: Books, url: str) -> None:
    """There is no cache beside the database that could drift: balance, key's spend and rows are of one snapshot."""
    key = books.new_key(budget=10**9, budget_period="month")
    done = False

    def read() -> None:
        with Ledger(url, now=lambda: NOON) as mine:
            while not done:
                assert mine.check().differences == ()
                found = mine.find_key(key.digest)
                assert found is not None
                assert found[0].spent_version == found[1].version
                assert found[0].spent + found[1].balance == 10**12

    with ThreadPoolExecutor(1) as pool, Ledger(url, now=lambda: NOON) as timed:
        reading = pool.submit(read)
        for number in range(30):
            timed.settle([books.settlement(f"r{number}", key_id=key.key_id)])
        done = True
        reading.result(60)


def test_a_request_id_is_one_row_and_one_charge_however_often_it_comes(books: Books, tmp_path: Path) -> None:
    """Through the committer, the spool and directly; duplicated or dropped rows would show in count and balance."""
    spool = Spool(tmp_path, "gateway-1")
    settlements = [books.settlement(f"r{number}") for number in range(40)]
    for one in settlements[::2]:
        spool.append(one)
    committer = GroupCommitter(books.ledger.settle, max_batch=7)
    rng = random.Random(7)
    futures = [committer.submit(one) for one in rng.choices(settlements, k=100)]
    assert spool.replay(books.ledger.settle) == 20
    answers = books.ledger.settle(settlements)
    assert {future.result(30).charged for future in futures} == {COST}
    assert all(isinstance(one, Settled) and one.charged == COST for one in answers)
    committer.close()
    spool.close()
    rows = books.ledger.export_usage().rows
    assert sorted(one.request_id for one in rows) == sorted(one.request_id for one in settlements)
    assert books.account.balance == 10**12 - 40 * COST
    assert books.ledger.check().ok


def test_concurrent_charges_never_drive_a_balance_negative(ledger: Ledger) -> None:
    """There is no check before the deduction: what is left is read and spent under the writer's lock."""
    books = Books(ledger, top_up=7 * COST + 5)
    ledger.credit(books.account_id, 3 * COST, "grant")
    seen: list[int] = []

    def client(name: int) -> int:
        charged = 0
        for number in range(5):
            (settled,) = ledger.settle([books.settlement(f"{name}-{number}")])
            assert isinstance(settled, Settled)
            seen.append(settled.balance)
            charged += settled.charged
        return charged

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(client, range(6))) == 10 * COST + 5
    assert min(seen) == books.account.balance == 0
    assert ledger.check().ok


def test_a_client_that_left_pays_for_what_was_produced_and_nothing_for_nothing(books: Books) -> None:
    produced, nothing = books.ledger.settle(
        [
            books.settlement("produced", outcome=Outcome.CANCELLED),
            books.settlement("nothing", outcome=Outcome.CANCELLED, completion_tokens=0),
        ]
    )
    assert isinstance(produced, Settled)
    assert isinstance(nothing, Settled)
    assert (produced.charged, nothing.charged) == (COST, 0)


def test_a_usage_above_what_the_balance_holds_is_billed_to_zero_and_the_rest_is_on_record(ledger: Ledger) -> None:
    """A settlement above its hold does not fail, and the difference does not vanish."""
    books = Books(ledger, top_up=COST - 6)
    (settled,) = ledger.settle([books.settlement("r1")])
    assert isinstance(settled, Settled)
    assert (settled.charged, settled.balance) == (COST - 6, 0)
    (record,) = ledger.export_usage().rows
    assert (record.charged, record.uncollected) == (COST - 6, 6)
    assert ledger.check().ok


def test_a_stale_copy_of_a_key_is_never_written_back(books: Books) -> None:
    """A change writes what it was given and nothing else; the feed's versions tell an old copy from a new one."""
    key = books.key()
    revoked = books.ledger.revoke_key(books.key_id)
    changed = books.ledger.update_key(books.key_id, rpm=key.rpm, name=key.name, tpm=5)
    assert (changed.active, changed.revoked_at, changed.tpm) == (False, revoked.revoked_at, 5)
    books.ledger.settle([books.settlement("r1")])
    assert books.key() == books.ledger.changes(0).keys[0]
    assert not books.key().active
    assert key.version < revoked.version < changed.version


def test_a_stopped_account_is_stopped_with_all_its_keys(books: Books) -> None:
    """A key is found together with its account of the same snapshot, so none outlives it."""
    stored = books.ledger.create_key(books.account_id, "k", keys.digest(keys.new_key(), SECRET), "sk-…")
    books.ledger.set_active(books.account_id, False)
    for digest in (stored.digest, books.key().digest):
        found = books.ledger.find_key(digest)
        assert found is not None
        assert not found[1].active


def test_an_unknown_end_of_a_commit_is_said_and_not_guessed(books: Books) -> None:
    """LedgerUnavailable means: ask again with the same id. Neither answer doubles or drops the spend."""
    calls: list[int] = []

    def settle(batch: object) -> object:
        calls.append(1)
        if len(calls) % 2:
            books.ledger.settle(batch)  # type: ignore[arg-type]
        raise LedgerUnavailable("connection lost")

    committer = GroupCommitter(settle, give_up_after_s=0.05)  # type: ignore[arg-type]
    future = committer.submit(books.settlement("r1"))
    assert isinstance(future.exception(30), LedgerUnavailable)
    committer.close()
    (again,) = books.ledger.settle([books.settlement("r1")])
    assert isinstance(again, Settled)
    assert (again.duplicate, again.charged, again.balance) == (True, COST, 10**12 - COST)
