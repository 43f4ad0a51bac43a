"""Settlements that wait together are committed together; none is answered before it is durable, none is forgotten."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.ledger import (
    Ledger,
    LedgerUnavailable,
    Refusal,
    Settled,
    Settlement,
    SettlementRefused,
    SettlementRejected,
)
from serve_app.ledger.group_commit import GroupCommitter

from .books import COST, Books

Results = list[Settled | SettlementRejected]


class Recorded:
    """Ledger.settle, with a record of the batches, a gate before it, and failures on demand."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Callable[[Sequence[Settlement]], None] = lambda batch: None

    def __call__(self, batch: Sequence[Settlement]) -> Results:
        self.entered.set()
        self.gate.wait(20)
        self.batches.append(len(batch))
        self.fail(batch)
        return self._ledger.settle(batch)


def test_what_waits_together_is_committed_together(books: Books) -> None:
    settle = Recorded(books.ledger)
    settle.gate.clear()
    committer = GroupCommitter(settle, max_batch=10)
    first = committer.submit(books.settlement("first"))
    settle.entered.wait(5)
    futures = [committer.submit(books.settlement(f"r{number}")) for number in range(25)]
    assert not first.done()
    settle.gate.set()
    assert first.result(10).charged == COST
    assert {future.result(10).charged for future in futures} == {COST}
    assert settle.batches == [1, 10, 10, 5]
    assert committer.close(5)
    assert books.account.balance == 10**12 - 26 * COST


def test_a_result_comes_only_after_the_commit(books: Books, url: str) -> None:
    committer = GroupCommitter(books.ledger.settle)
    seen: list[int] = []
    futures = []
    with Ledger(url) as elsewhere:

        def look(_: Future[Settled]) -> None:
            seen.append(elsewhere.account_totals(books.account_id).requests)

        for number in range(20):
            future = committer.submit(books.settlement(f"r{number}"))
            future.add_done_callback(look)
            futures.append(future)
        committer.close()
        assert all(count > place for place, count in enumerate(seen))
        assert len(seen) == 20


def test_many_threads_submit_and_each_gets_its_own_answer(books: Books) -> None:
    committer = GroupCommitter(books.ledger.settle)
    answers: dict[str, Settled] = {}

    def client(name: int) -> None:
        for number in range(20):
            answer = committer.submit(books.settlement(f"{name}-{number}")).result(20)
            answers[f"{name}-{number}"] = answer

    threads = [threading.Thread(target=client, args=(name,)) for name in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    committer.close()
    assert len(answers) == 200
    assert all(name == answer.request_id and answer.charged == COST for name, answer in answers.items())
    assert books.account.balance == 10**12 - 200 * COST


def test_a_refused_settlement_says_why_and_spares_the_others(books: Books) -> None:
    settle = Recorded(books.ledger)
    settle.gate.clear()
    committer = GroupCommitter(settle)
    bad = committer.submit(books.settlement("bad", prompt_tokens=-1))
    good = committer.submit(books.settlement("good"))
    settle.gate.set()
    assert good.result(10).charged == COST
    with pytest.raises(SettlementRefused, match="prompt_tokens") as caught:
        bad.result(10)
    assert caught.value.rejected.refusal is Refusal.INVALID
    committer.close()


def test_one_that_upsets_the_database_in_an_unforeseen_way_spares_the_others(books: Books) -> None:
    settle = Recorded(books.ledger)

    def fail(batch: Sequence[Settlement]) -> None:
        if any(one.request_id == "cursed" for one in batch):
            raise sa.exc.DataError("INSERT", {}, ValueError("out of range"))

    settle.fail = fail
    settle.gate.clear()
    committer = GroupCommitter(settle)
    futures = [committer.submit(books.settlement(name)) for name in ("r1", "r2", "cursed", "r3")]
    settle.gate.set()
    with pytest.raises(sa.exc.DataError):
        futures.pop(2).result(10)
    assert {future.result(10).charged for future in futures} == {COST}
    committer.close()


def test_a_caller_that_goes_away_is_billed_all_the_same(books: Books) -> None:
    settle = Recorded(books.ledger)
    settle.gate.clear()
    committer = GroupCommitter(settle)

    async def client() -> None:
        await asyncio.wrap_future(committer.submit(books.settlement("r1")))

    async def leave() -> None:
        task = asyncio.create_task(client())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    settle.gate.set()
    committer.close()
    assert books.account.balance == 10**12 - COST


def test_a_database_that_comes_back_in_time_costs_nobody_anything(books: Books) -> None:
    settle = Recorded(books.ledger)
    back = time.monotonic() + 0.5

    def fail(batch: Sequence[Settlement]) -> None:
        if time.monotonic() < back:
            raise LedgerUnavailable("connection lost")

    settle.fail = fail
    committer = GroupCommitter(settle, give_up_after_s=10)
    futures = [committer.submit(books.settlement(f"r{number}")) for number in range(5)]
    assert {future.result(10).charged for future in futures} == {COST}
    assert 2 < len(settle.batches) < 20  # it waits longer each time
    committer.close()
    assert books.account.balance == 10**12 - 5 * COST


def test_a_database_that_stays_away_fails_all_that_wait_within_the_bound(books: Books) -> None:
    settle = Recorded(books.ledger)

    def fail(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection lost")

    settle.fail = fail
    committer = GroupCommitter(settle, max_batch=2, give_up_after_s=0.4)
    began = time.monotonic()
    futures = [committer.submit(books.settlement(f"r{number}")) for number in range(9)]
    for future in futures:
        with pytest.raises(LedgerUnavailable):
            future.result(10)
    assert 0.4 <= time.monotonic() - began < 3
    settle.fail = lambda batch: None
    assert committer.submit(books.settlement("r1")).result(10).charged == COST  # it is as good as new
    committer.close()


def test_a_commit_whose_answer_was_lost_is_not_billed_twice(books: Books) -> None:
    answers: list[Results] = []

    def settle(batch: Sequence[Settlement]) -> Results:
        answers.append(books.ledger.settle(batch))
        if len(answers) == 1:
            raise LedgerUnavailable("connection lost during the commit")
        return answers[-1]

    committer = GroupCommitter(settle)
    answer = committer.submit(books.settlement("r1")).result(10)
    committer.close()
    assert (answer.charged, answer.duplicate, answer.balance) == (COST, True, 10**12 - COST)


def test_a_closed_or_crowded_committer_says_so(books: Books) -> None:
    settle = Recorded(books.ledger)
    settle.gate.clear()
    committer = GroupCommitter(settle, max_waiting=2)
    held = [committer.submit(books.settlement(f"r{number}")) for number in range(2)]
    with pytest.raises(LedgerUnavailable, match="waiting already"):
        committer.submit(books.settlement("r3")).result(1)
    settle.gate.set()
    assert committer.close(10)
    assert {future.result(0).charged for future in held} == {COST}
    with pytest.raises(LedgerUnavailable, match="closed"):
        committer.submit(books.settlement("r4")).result(1)


def test_another_program_that_holds_the_write_lock_delays_and_does_not_lose(
    books: Books, url: str, tmp_path: Path
) -> None:
    with Ledger(url, wait_s=0.1) as impatient:
        engine = sa.create_engine(url)
        with engine.connect() as blocker:
            if url.startswith("sqlite"):
                blocker.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                blocker.exec_driver_sql("SELECT * FROM ledger_head FOR UPDATE")
            committer = GroupCommitter(impatient.settle, give_up_after_s=10)
            future = committer.submit(books.settlement("r1"))
            time.sleep(0.5)
            assert not future.done()
            blocker.rollback()
        assert future.result(10).charged == COST
        committer.close()
        engine.dispose()


def test_a_postgresql_that_drops_every_connection_is_survived(books: Books, url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite has no connections to drop")
    committer = GroupCommitter(books.ledger.settle, give_up_after_s=10)
    stop = threading.Event()

    def disturb() -> None:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            while not stop.is_set():
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                time.sleep(0.05)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    futures = []
    for number in range(100):
        futures.append(committer.submit(books.settlement(f"r{number}")))
        time.sleep(0.005)
    stop.set()
    disturber.join()
    assert {future.result(20).charged for future in futures} == {COST}
    committer.close()
    assert books.account.balance == 10**12 - 100 * COST
    assert books.ledger.check().ok
