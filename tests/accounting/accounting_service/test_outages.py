"""A database that is away, hangs or drops connections costs time: nothing is lost, doubled or piled up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.accounting import accounting_service
from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import Settled, Settlement
from serve_app.contracts.commands import (
    FindKeys,
)
from serve_app.contracts.errors import LedgerUnavailable
from tests.accounting.accounting_service.settling import Recorded, settled, until
from tests.accounting.books import COST, Books, Ledger


async def test_what_waits_for_a_ledger_that_hangs_is_bounded_in_time_number_and_threads(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = threading.Event()
    monkeypatch.setattr(accounting_service, "LANE_WAIT_S", 0.05)
    monkeypatch.setattr(accounting_service, "MAX_WAITING", 10)
    monkeypatch.setattr(books.ledger, "run", lambda command: finish.wait(600))
    before = threading.active_count()
    asking = [asyncio.create_task(service.run(FindKeys(("none",)))) for _ in range(50)]
    done, running = await asyncio.wait(asking, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    while len(running) > 4:
        more, running = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert more
        done |= more
    assert {type(task.result()) for task in done} == {LedgerUnavailable}
    assert threading.active_count() - before <= 4
    for task in running:
        task.cancel()  # a caller that goes away does not free the thread
    await asyncio.wait(running)
    assert isinstance(await service.run(FindKeys(("none",))), LedgerUnavailable)
    finish.set()
    async with asyncio.timeout(60):
        while isinstance(await service.run(FindKeys(("none",))), LedgerUnavailable):
            pass


async def test_a_process_with_a_stuck_thread_is_unhealthy_and_one_whose_database_is_away_is_not(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, overdue = 0.0, 0.0
    service = AccountingService(books.ledger, clock=lambda: now)
    monkeypatch.setattr(accounting_service, "UNAVAILABLE_RETRY_S", 0.0)
    monkeypatch.setattr(books.ledger, "overdue_s", lambda: overdue)

    def away(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection refused")

    recorded.fail = away
    for _ in range(3):
        now += 3600
        (answer,) = await service.settle([books.settlement("r")])
        assert isinstance(answer, LedgerUnavailable)
        service.check_health()
    overdue = accounting_service.STUCK_S + 1
    with pytest.raises(RuntimeError, match="should have ended"):
        service.check_health()
    overdue = 0.0
    recorded.gate.clear()
    recorded.entered.clear()
    settling = asyncio.create_task(service.settle([books.settlement("r")]))
    await recorded.is_entered()
    service.check_health()
    now += accounting_service.COMMIT_STUCK_S + 1
    with pytest.raises(RuntimeError, match="commit thread"):
        service.check_health()
    recorded.gate.set()
    await settling
    service.check_health()
    await service.close()


async def test_a_database_that_is_away_is_tried_at_intervals_however_many_ask(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection refused")

    monkeypatch.setattr(accounting_service, "UNAVAILABLE_RETRY_S", 3600.0)
    recorded.fail = fail
    service = AccountingService(books.ledger)
    asking = [asyncio.create_task(service.settle([books.settlement(f"r{number}")])) for number in range(30)]
    await until(lambda: bool(recorded.batches))
    asking += [asyncio.create_task(service.settle([books.settlement(f"later{number}")])) for number in range(30)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(recorded.batches) == 1
    for task in asking:
        task.cancel()


async def test_a_database_that_fails_leaves_no_queue_behind(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what waited would be tried list by list after the outage, in front of what is asked then."""

    def fail(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection refused")

    monkeypatch.setattr(accounting_service, "UNAVAILABLE_RETRY_S", 0.0)
    recorded.fail = fail
    recorded.gate.clear()
    service = AccountingService(books.ledger)
    asking = [asyncio.create_task(service.settle([books.settlement(f"r{number}")])) for number in range(1000)]
    await recorded.is_entered()
    recorded.gate.set()
    answers = await asyncio.gather(*asking)
    assert all(isinstance(answer, LedgerUnavailable) for [answer] in answers)
    assert len(recorded.batches) == 1
    await service.close()


async def test_while_the_database_is_away_each_settlement_gets_ledger_unavailable(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    def fail(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection lost")

    recorded.fail = fail
    batch = [books.settlement(f"r{number}") for number in range(9)]
    assert [type(answer) for answer in await service.settle(batch)] == [LedgerUnavailable] * 9
    assert recorded.batches == [9]
    recorded.fail = lambda batch: None
    assert [answer.duplicate for answer in await service.settle(batch) if isinstance(answer, Settled)] == [False] * 9


async def test_a_commit_whose_answer_was_lost_is_not_billed_twice(
    service: AccountingService, books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(batch: Sequence[Settlement]) -> None:
        recorded(batch)
        raise LedgerUnavailable("connection lost during the commit")

    with monkeypatch.context() as lost:
        lost.setattr(books.ledger, "settle", lose)
        (unknown,) = await service.settle([books.settlement("r1")])
    assert isinstance(unknown, LedgerUnavailable)
    answer = await settled(service, books.settlement("r1"))
    assert (answer.charged, answer.duplicate, answer.balance) == (COST, True, 10**12 - COST)


async def test_a_database_that_hangs_raises_ledger_unavailable(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting_service, "COMMIT_TIMEOUT_S", 0.05)
    service = AccountingService(books.ledger)
    recorded.gate.clear()
    (unknown,) = await service.settle([books.settlement("r1")])
    assert isinstance(unknown, LedgerUnavailable)
    recorded.gate.set()
    await service.close()


async def test_a_write_lock_of_another_program_delays_settlements_and_loses_none(books: Books, url: str) -> None:
    service = AccountingService(Ledger(url, wait_s=0.1))
    engine = sa.create_engine(url)
    with engine.connect() as blocker:
        if url.startswith("sqlite"):
            blocker.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            blocker.exec_driver_sql("SELECT * FROM ledger_head FOR UPDATE")
        assert isinstance((await service.settle([books.settlement("r1")]))[0], LedgerUnavailable)
        blocker.rollback()
    assert not (await settled(service, books.settlement("r1"))).duplicate
    await service.close()
    engine.dispose()


@pytest.mark.slow
async def test_settlements_survive_a_postgresql_that_drops_every_connection(
    on_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(on_postgres)
    books, service = Books(ledger), AccountingService(ledger)
    monkeypatch.setattr(accounting_service, "UNAVAILABLE_RETRY_S", 0.0)
    settled_at_all = asyncio.Semaphore(0)

    async def client(number: int) -> None:
        """Repeats each settlement until it is settled, as a gateway does."""
        for name in (f"{number}-{turn}" for turn in range(20)):
            while isinstance(answer := (await service.settle([books.settlement(name)]))[0], LedgerUnavailable):
                pass
            assert isinstance(answer, Settled)
            assert answer.charged == COST
            settled_at_all.release()

    drop = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with asyncio.timeout(300):
        clients = [asyncio.create_task(client(number)) for number in range(10)]
        plain = on_postgres.replace("+psycopg", "")
        async with await psycopg.AsyncConnection.connect(plain, autocommit=True) as connection:
            for _ in range(15):
                for _ in range(10):
                    await settled_at_all.acquire()
                await connection.execute(drop)
        await asyncio.gather(*clients)
    assert books.account.balance == 10**12 - 200 * COST
    assert ledger.check().ok
    await service.close()
