"""Billing faults known from other services do not occur: nothing lost, nothing doubled, never below zero."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Settled
from serve_app.storage.spool import Spool

from .books import COST, NOON, Books, Ledger


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


async def test_a_request_id_sent_many_times_is_one_row_and_one_charge(books: Books, tmp_path: Path) -> None:
    """Through the service, the spool and directly; duplicated or dropped rows would show in count and balance."""
    spool = Spool(tmp_path, "gateway-1")
    settlements = [books.settlement(f"r{number}") for number in range(40)]
    for one in settlements[::2]:
        spool.append(one)
    service = AccountingService(books.ledger)
    rng = random.Random(7)
    calls = [asyncio.create_task(service.settle([one])) for one in rng.choices(settlements, k=100)]
    await asyncio.to_thread(spool.replay, books.ledger.settle)
    assert spool.size == 0
    answers = await asyncio.to_thread(books.ledger.settle, settlements)
    answers += [answer for call in calls for answer in await call]
    assert all(isinstance(one, Settled) and one.charged == COST for one in answers)
    await service.close()
    spool.close()
    rows = books.ledger.export_usage().rows
    assert sorted(one.request_id for one in rows) == sorted(one.request_id for one in settlements)
    assert books.account.balance == 10**12 - 40 * COST
    assert books.ledger.check().ok


def test_concurrent_charges_never_drive_a_balance_negative(ledger: Ledger) -> None:
    """There is no separate check before the charge: the balance is read and charged under the writer's lock."""
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


def test_a_stale_copy_of_a_key_is_never_written_back(books: Books) -> None:
    """A change writes only the given fields; the versions of the feed distinguish an old copy from a new one."""
    key = books.key()
    revoked = books.ledger.revoke_key(books.key_id)
    changed = books.ledger.update_key(books.key_id, rpm=key.limits.get("rpm"), name=key.name, tpm=5)
    assert (changed.active, changed.revoked_at, changed.limits["tpm"]) == (False, revoked.revoked_at, 5)
    books.ledger.settle([books.settlement("r1")])
    assert books.key() == books.ledger.changes(0).keys[0]
    assert not books.key().active
    assert key.version < revoked.version < changed.version


def test_a_stopped_account_is_stopped_with_all_its_keys(books: Books) -> None:
    """A key is read together with its account in one snapshot, so no key stays active longer than its account."""
    stored = books.ledger.create_key(books.account_id, "k", keys.digest(keys.new_key()), "sk-…")
    books.ledger.set_active(books.account_id, False)
    for digest in (stored.digest, books.key().digest):
        found = books.ledger.find_key(digest)
        assert found is not None
        assert not found[1].active
