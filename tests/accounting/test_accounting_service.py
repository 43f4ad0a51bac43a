"""The accounting process commits waiting settlements together, loses none, and tidies its ledger in the background."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.accounting import accounting_service
from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts import key_format as keys
from serve_app.contracts import metrics
from serve_app.contracts.books import Audit, Outcome, Refusal, Settled, Settlement, SettlementRejected, StoredReply
from serve_app.contracts.commands import (
    AddCredit,
    ExpireGrants,
    FindKeys,
    GetAccount,
    PruneReplies,
    ReadChanges,
    RevokeKey,
    SumUsage,
)
from serve_app.contracts.errors import AccountNotFound, LedgerUnavailable
from serve_app.contracts.metric import Metric
from serve_app.contracts.money import Price

from .books import COST, Books, Ledger

HOUR = 3600.0
NOON = 1_780_315_200.0


class Book:
    """A ledger file with one account and a clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.now = NOON
        self.ledger = self.open()
        self.account_id = self.ledger.create_account("Ada").account_id
        key = keys.new_key()
        self.key_id = self.ledger.create_key(self.account_id, "main", keys.digest(key, "s"), keys.hint(key)).key_id

    def open(self) -> Ledger:
        return Ledger(f"sqlite:///{self.path}", now=lambda: self.now)

    def replies(self) -> int:
        """The number of rows, expired ones included."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM replies").fetchone()
        return int(count)

    def settlement(self, request_id: str, **changed: Any) -> Settlement:
        price = Price(1, 1, 1)
        fixed = (self.account_id, self.key_id, "svc-chat", "stub", price, 3, 0, 2, Outcome.COMPLETED, NOON, NOON)
        return Settlement(request_id, *fixed, **changed)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.01)


async def test_expired_grants_and_old_replies_are_removed_without_a_request(book: Book) -> None:
    book.ledger.credit(book.account_id, 100, "grant", expires_at=NOON + HOUR)
    book.ledger.credit(book.account_id, 7, "grant")
    book.ledger.settle([book.settlement("r1", reply=StoredReply("retry", "f", b"{}"))])
    services = [AccountingService(book.open(), tidy_every_s=0.02) for _ in range(3)]
    for service in services:
        service.start()
    book.now += 25 * HOUR
    await until(lambda: book.ledger.get_account(book.account_id).balance == 7)
    await until(lambda: book.replies() == 0)
    (settled,) = await services[0].settle([book.settlement("r2")])
    assert isinstance(settled, Settled)
    assert settled.balance == 2
    for service in services:
        await service.close()
    report = book.ledger.check()
    assert report.ok
    assert report.entries == 5  # two grants, two charges, and one expiry, in any order


async def test_the_cleanup_runs_again_after_an_outage_of_the_ledger(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Semaphore(0)
    away = threading.Event()
    away.set()
    real = book.ledger.run

    def run(command: Any) -> Any:
        if isinstance(command, PruneReplies):
            return 1 // 0  # a programming error does not stop the cleanup either
        if isinstance(command, ExpireGrants):
            tried.release()
            if away.is_set():
                raise LedgerUnavailable("connection refused")
        return real(command)

    monkeypatch.setattr(book.ledger, "run", run)
    book.ledger.credit(book.account_id, 100, "grant", expires_at=NOON + HOUR)
    book.now += 3 * HOUR
    service = AccountingService(book.ledger, tidy_every_s=0.01)
    service.start()
    for _ in range(3):
        assert await asyncio.to_thread(tried.acquire, timeout=30)
    assert book.ledger.get_account(book.account_id).balance == 100
    away.clear()
    await until(lambda: book.ledger.get_account(book.account_id).balance == 0)
    await service.close()


async def test_a_service_that_was_never_started_closes_at_once(book: Book) -> None:
    service = AccountingService(book.ledger)
    async with asyncio.timeout(30):
        await service.close()


async def test_an_error_of_the_ledger_is_returned_so_that_it_crosses_processes_unwrapped(book: Book) -> None:
    service = AccountingService(book.ledger)
    assert isinstance(await service.run(GetAccount("acct_none")), AccountNotFound)
    await service.close()


async def test_a_replica_may_settle_a_cut_call_and_nothing_else(book: Book) -> None:
    service = AccountingService(book.ledger)
    book.ledger.credit(book.account_id, 100)
    cut = replace(book.settlement("r1"), outcome=Outcome.CANCELLED)
    (settled,) = await service.answer_replica([cut])
    assert isinstance(settled, Settled)
    credit, kept = AddCredit(book.account_id, 10**9), replace(cut, reply=StoredReply("retry", "f", b"{}"))
    others: list[Any] = [credit, [credit], [cut, kept], "r1"]
    for other in others:
        with pytest.raises(PermissionError, match="a replica may settle calls that were cut"):
            await service.answer_replica(other)
    assert book.ledger.get_account(book.account_id).balance == 100 - 5
    await service.close()


async def test_what_no_balance_covered_is_counted_once(book: Book) -> None:
    counted: list[tuple[Any, ...]] = []
    lags: list[float] = []
    exported = SimpleNamespace(
        add=lambda *added: counted.append(added), observe=lambda _, seconds: lags.append(seconds)
    )
    service = AccountingService(book.ledger, metrics=exported, wall=lambda: NOON + 3.0)  # type: ignore[arg-type]
    book.ledger.credit(book.account_id, 8)
    await service.settle([book.settlement("r1")])
    assert counted == [(metrics.REVENUE, 5e-9, "svc-chat")]
    await service.settle([book.settlement("r2"), book.settlement("r3")])
    await service.settle([book.settlement("r2"), book.settlement("r3"), book.settlement("r1")])
    assert [one for one in counted if one[0] is metrics.UNCOLLECTED] == [
        (metrics.UNCOLLECTED, 2e-9),
        (metrics.UNCOLLECTED, 5e-9),
    ]
    assert sum(one[1] for one in counted if one[0] is metrics.REVENUE) == pytest.approx(8e-9)
    assert lags == [3.0] * 3
    await service.close()


class Recorded:
    """Ledger.settle, with a record of the batches, a gate before it, and failures on demand."""

    def __init__(self, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
        self._settle = books.ledger.settle
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Callable[[Sequence[Settlement]], None] = lambda batch: None
        monkeypatch.setattr(books.ledger, "settle", self)

    def __call__(self, batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        self.entered.set()
        self.gate.wait(20)
        self.batches.append(len(batch))
        self.fail(batch)
        return self._settle(batch)


@pytest.fixture
def recorded(books: Books, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(books, monkeypatch)


@pytest.fixture
async def service(books: Books) -> AsyncIterator[AccountingService]:
    opened = AccountingService(books.ledger)
    yield opened
    await opened.close()


async def settled(service: AccountingService, settlement: Settlement) -> Settled:
    (answer,) = await service.settle([settlement])
    assert isinstance(answer, Settled)
    return answer


async def test_waiting_settlements_are_committed_together(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    recorded.gate.clear()
    first = asyncio.create_task(settled(service, books.settlement("first")))
    await asyncio.to_thread(recorded.entered.wait, 20)
    others = [asyncio.create_task(settled(service, books.settlement(f"r{number}"))) for number in range(25)]
    await asyncio.sleep(0.01)
    assert not first.done()
    recorded.gate.set()
    assert {answer.charged for answer in await asyncio.gather(first, *others)} == {COST}
    assert recorded.batches == [1, 25]
    assert books.account.balance == 10**12 - 26 * COST


async def test_an_answer_comes_only_after_the_commit(service: AccountingService, books: Books, url: str) -> None:
    with Ledger(url) as elsewhere:
        for number in range(10):
            await settled(service, books.settlement(f"r{number}"))
            assert elsewhere.account_totals(books.account_id).requests == number + 1


async def test_many_callers_at_once_get_their_own_answers(service: AccountingService, books: Books) -> None:
    async def client(name: int) -> None:
        for number in range(20):
            answer = await settled(service, books.settlement(f"{name}-{number}"))
            assert (answer.request_id, answer.charged) == (f"{name}-{number}", COST)

    await asyncio.gather(*(client(name) for name in range(10)))
    assert books.account.balance == 10**12 - 200 * COST


async def test_a_refused_settlement_reports_why_and_the_others_are_posted(
    service: AccountingService, books: Books
) -> None:
    bad, good = await service.settle([books.settlement("bad", prompt_tokens=-1), books.settlement("good")])
    assert isinstance(bad, SettlementRejected)
    assert bad.refusal is Refusal.INVALID
    assert "prompt_tokens" in bad.message
    assert isinstance(good, Settled)


async def test_when_the_database_rejects_one_settlement_the_others_are_posted(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    def fail(batch: Sequence[Settlement]) -> None:
        if any(settlement.request_id == "cursed" for settlement in batch):
            raise sa.exc.DataError("INSERT", {}, ValueError("out of range"))

    recorded.fail = fail
    r1, r2, cursed, r3 = await service.settle([books.settlement(name) for name in ("r1", "r2", "cursed", "r3")])
    reason = "the ledger failed on it: DataError"
    assert cursed == SettlementRejected("cursed", Refusal.FAILED, reason, kept=True)
    assert [answer.charged for answer in (r1, r2, r3) if isinstance(answer, Settled)] == [COST] * 3


async def test_a_caller_that_disconnects_is_still_billed(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    recorded.gate.clear()
    callers = [asyncio.create_task(service.settle([books.settlement(name)])) for name in ("in flight", "waiting")]
    await asyncio.to_thread(recorded.entered.wait, 20)
    for caller in callers:
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    recorded.gate.set()
    await service.close()
    assert books.account.balance == 10**12 - 2 * COST


async def test_closing_commits_waiting_settlements(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    recorded.gate.clear()
    callers = [asyncio.create_task(settled(service, books.settlement(f"r{number}"))) for number in range(30)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(service.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    recorded.gate.set()
    await closing
    assert books.ledger.account_totals(books.account_id).requests == 30
    assert {answer.charged for answer in await asyncio.gather(*callers)} == {COST}


async def test_a_settlement_does_not_wait_behind_reads(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    reading, read = threading.Event(), threading.Event()

    def slow_read(command: Any) -> Any:
        reading.set()
        read.wait(30)

    monkeypatch.setattr(books.ledger, "run", slow_read)
    reads = [asyncio.create_task(service.run(GetAccount(books.account_id))) for _ in range(3)]
    try:
        async with asyncio.timeout(20):
            while not reading.is_set():
                await asyncio.sleep(0.001)
        async with asyncio.timeout(20):
            assert (await settled(service, books.settlement("r"))).charged == COST
    finally:
        read.set()
    await asyncio.gather(*reads)


async def test_exports_keep_neither_look_ups_nor_the_feed_nor_revocations_waiting(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=8))
    finish = threading.Event()
    real = books.ledger.run

    def run(command: Any) -> Any:
        if isinstance(command, SumUsage):
            finish.wait(120)
        return real(command)

    monkeypatch.setattr(books.ledger, "run", run)
    reads = [asyncio.create_task(service.run(SumUsage())) for _ in range(20)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert (await service.run(ReadChanges(0))).version > 0
            assert await service.run(FindKeys(("none",))) == {}
            assert not (await service.run(RevokeKey(books.key_id))).active
    finally:
        finish.set()
    await asyncio.gather(*reads)


async def test_what_waits_for_a_ledger_that_hangs_is_bounded_in_time_number_and_threads(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = threading.Event()
    monkeypatch.setattr(accounting_service, "LANE_WAIT_S", 0.05)
    monkeypatch.setattr(accounting_service, "MOST_WAITING", 10)
    monkeypatch.setattr(books.ledger, "run", lambda command: finish.wait(120))
    before = threading.active_count()
    asking = [asyncio.create_task(service.run(FindKeys(("none",)))) for _ in range(50)]
    done, running = await asyncio.wait(asking, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    while len(running) > 4:
        more, running = await asyncio.wait(running, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert more
        done |= more
    assert {type(task.result()) for task in done} == {LedgerUnavailable}
    assert threading.active_count() - before <= 4
    for task in running:
        task.cancel()  # a caller that goes away does not free the thread
    await asyncio.wait(running)
    assert isinstance(await service.run(FindKeys(("none",))), LedgerUnavailable)
    finish.set()
    async with asyncio.timeout(30):
        while isinstance(await service.run(FindKeys(("none",))), LedgerUnavailable):
            pass


async def test_a_process_with_a_stuck_thread_is_unhealthy_and_one_whose_database_is_away_is_not(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, overdue = 0.0, 0.0
    service = AccountingService(books.ledger, clock=lambda: now)
    monkeypatch.setattr(accounting_service, "AWAY_S", 0.0)
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
    await asyncio.to_thread(recorded.entered.wait, 20)
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

    monkeypatch.setattr(accounting_service, "AWAY_S", 3600.0)
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


async def test_settlements_survive_a_postgresql_that_drops_every_connection(
    service: AccountingService, books: Books, url: str
) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite has no connections to drop")
    stop = threading.Event()

    def disturb() -> None:
        """Again and again, at growing intervals: a busy machine may not connect and commit within the first ones."""
        pause_s = 0.05
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            while not stop.wait(pause_s):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                pause_s = min(1.2 * pause_s, 1.0)

    async def client(number: int) -> int:
        """Repeats its settlement until it is settled, as a gateway does."""
        await asyncio.sleep(0.005 * number)
        async with asyncio.timeout(20):
            while True:
                (answer,) = await service.settle([books.settlement(f"r{number}")])
                if isinstance(answer, Settled):
                    return answer.charged
                assert isinstance(answer, LedgerUnavailable)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        charged = await asyncio.gather(*(client(number) for number in range(100)))
    finally:
        stop.set()
        disturber.join()
    assert set(charged) == {COST}
    assert books.account.balance == 10**12 - 100 * COST
    assert books.ledger.check().ok


async def test_a_settlement_that_fails_unforeseen_is_kept_and_settled_on_command(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    def fail(batch: Sequence[Settlement]) -> None:
        if any(settlement.request_id == "cursed" for settlement in batch):
            raise ZeroDivisionError

    recorded.fail = fail
    reply = StoredReply("key", "fingerprint", b"body")
    sent = [books.settlement("good"), books.settlement("cursed", reply=reply)]
    for _ in range(2):  # its gateway repeats it
        good, cursed = await service.settle(sent)
        assert isinstance(good, Settled)
        assert isinstance(cursed, SettlementRejected)
        assert cursed.kept
    [stuck] = books.ledger.stuck()
    assert (stuck.stuck_id, stuck.account_id, stuck.refusal) == ("cursed", books.account_id, Refusal.FAILED)
    assert (stuck.reason, stuck.tries) == ("the ledger failed on it: ZeroDivisionError", 2)
    assert stuck.settlement["completion_tokens"] == 4
    assert books.account.balance == 10**12 - COST

    # While the cause is there it stays; then it is settled once.
    [still] = books.ledger.retry_stuck(("cursed", "unknown"))
    assert still.tries == 3
    recorded.fail = lambda batch: None
    assert books.ledger.retry_stuck(("cursed",), Audit("operator")) == []
    assert books.ledger.retry_stuck(("cursed",)) == []
    assert books.ledger.stuck() == []
    assert books.account.balance == 10**12 - 2 * COST
    [record] = books.ledger.audit_log(books.account_id)
    assert (record.action, record.detail) == ("retry_stuck", {"request_id": "cursed"})
    assert books.ledger.check().ok


async def test_what_the_ledger_refuses_for_a_known_reason_is_kept_as_well(
    service: AccountingService, books: Books
) -> None:
    sent = [books.settlement("r1", account_id="acct_none"), books.settlement("r2"), books.settlement("r\x003")]
    first, second, third = await service.settle(sent)
    assert isinstance(first, SettlementRejected)
    assert isinstance(third, SettlementRejected)
    assert (first.refusal, first.kept) == (Refusal.ACCOUNT_NOT_FOUND, True)
    assert (third.refusal, third.kept) == (Refusal.INVALID, True)
    assert isinstance(second, Settled)
    assert {stuck.refusal for stuck in books.ledger.stuck()} == {Refusal.ACCOUNT_NOT_FOUND, Refusal.INVALID}
    assert books.ledger.count_stuck() == 2


async def test_what_can_not_be_kept_either_is_in_the_log(
    service: AccountingService, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    [refused] = await service.settle([books.settlement("r1", started_at=float("nan"))])
    assert isinstance(refused, SettlementRejected)
    assert not refused.kept
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "request_id='r1'" in record.getMessage()


async def test_a_ledger_that_can_not_keep_it_now_is_asked_again(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise LedgerUnavailable("connection lost")

    with monkeypatch.context() as broken:
        broken.setattr(books.ledger, "keep_stuck", away)
        [unknown, good] = await service.settle([books.settlement("r1", account_id="acct_none"), books.settlement("r2")])
        assert isinstance(unknown, LedgerUnavailable)
        assert isinstance(good, Settled)


async def test_the_ledger_says_which_requests_it_does_not_have(service: AccountingService, books: Books) -> None:
    await service.settle([books.settlement("r1"), books.settlement("stuck", account_id="acct_none")])
    assert books.ledger.find_unsettled(("r0", "r1", "stuck", "r2", "r0")) == ["r0", "r2"]


async def test_a_database_that_fails_leaves_no_queue_behind(
    books: Books, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what waited would be tried list by list after the outage, in front of what is asked then."""

    def fail(batch: Sequence[Settlement]) -> None:
        raise LedgerUnavailable("connection refused")

    monkeypatch.setattr(accounting_service, "AWAY_S", 0.0)
    recorded.fail = fail
    recorded.gate.clear()
    service = AccountingService(books.ledger)
    asking = [asyncio.create_task(service.settle([books.settlement(f"r{number}")])) for number in range(1000)]
    await asyncio.to_thread(recorded.entered.wait, 20)
    recorded.gate.set()
    answers = await asyncio.gather(*asking)
    assert all(isinstance(answer, LedgerUnavailable) for [answer] in answers)
    assert len(recorded.batches) == 1
    await service.close()


async def test_the_number_of_stuck_settlements_is_a_metric_from_the_start(books: Books) -> None:
    set_to: list[tuple[str, float]] = []

    class Gauges:
        def set(self, gauge: Metric, value: float, *labels: str) -> None:
            set_to.append((gauge.name, value))

    for expected in (0, 1):
        service = AccountingService(books.ledger, metrics=Gauges())  # type: ignore[arg-type]
        service.start()
        await until(lambda: bool(set_to))
        assert set_to == [("serve_app_stuck_settlements", expected)]
        set_to.clear()
        await service.settle([books.settlement("r", account_id="acct_none")])
        await service.close()


async def test_the_better_settlement_may_come_after_that_of_a_replica(service: AccountingService, books: Books) -> None:
    """A gateway that a replica took for dead: its reply is kept for retries, and nothing is charged again."""
    await service.settle([books.settlement("r1", outcome=Outcome.CANCELLED)])
    [again] = await service.settle([books.settlement("r1", reply=StoredReply("key", "fingerprint", b"body"))])
    assert isinstance(again, Settled)
    assert (again.duplicate, again.balance) == (True, 10**12 - COST)
    stored = books.ledger.find_reply(books.account_id, "key")
    assert stored is not None
    assert stored.body == b"body"
