"""The accounting process commits waiting settlements together, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import (
    Outcome,
    Refusal,
    Settled,
    Settlement,
    SettlementRejected,
    StoredReply,
    StoredResponse,
)
from serve_app.contracts.commands import (
    AddCredit,
    FindKeys,
    FindReply,
    GetAccount,
    ReadChanges,
    RevokeKey,
    SumUsage,
)
from serve_app.contracts.errors import AccountNotFound
from tests.accounting.accounting_service.settling import Book, Recorded, settled
from tests.accounting.books import COST, Books, Ledger


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
    stored = replace(cut, response=StoredResponse("resp_1", b"{}", 9e9))
    others: list[Any] = [credit, [credit], [cut, kept], [stored], "r1"]
    for other in others:
        with pytest.raises(PermissionError, match="a replica may only settle interrupted calls"):
            await service.answer_replica(other)
    assert book.ledger.get_account(book.account_id).balance == 100 - 5
    await service.close()


async def test_waiting_settlements_are_committed_together(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    recorded.gate.clear()
    first = asyncio.create_task(settled(service, books.settlement("first")))
    await recorded.is_entered()
    others = [asyncio.create_task(settled(service, books.settlement(f"r{number}"))) for number in range(25)]
    await asyncio.sleep(0)
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
    reason = "unexpected error in the ledger: DataError"
    assert cursed == SettlementRejected("cursed", Refusal.FAILED, reason, kept=True)
    assert [answer.charged for answer in (r1, r2, r3) if isinstance(answer, Settled)] == [COST] * 3


async def test_a_caller_that_disconnects_is_still_billed(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    recorded.gate.clear()
    callers = [asyncio.create_task(service.settle([books.settlement(name)])) for name in ("in flight", "waiting")]
    await recorded.is_entered()
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
    await recorded.is_entered()
    for _ in range(10):
        await asyncio.sleep(0)
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
        read.wait(600)

    monkeypatch.setattr(books.ledger, "run", slow_read)
    reads = [asyncio.create_task(service.run(GetAccount(books.account_id))) for _ in range(3)]
    try:
        async with asyncio.timeout(60):
            while not reading.is_set():
                await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            assert (await settled(service, books.settlement("r"))).charged == COST
    finally:
        read.set()
    await asyncio.gather(*reads)


async def test_exports_and_stored_replies_keep_nothing_else_waiting(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=8))
    finish = threading.Event()
    real = books.ledger.run

    def run(command: Any) -> Any:
        if isinstance(command, SumUsage | FindReply):
            finish.wait(600)
        return real(command)

    monkeypatch.setattr(books.ledger, "run", run)
    slow = (SumUsage(), FindReply(books.account_id, "key"))
    reads = [asyncio.create_task(service.run(command)) for command in slow for _ in range(20)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert (await service.run(ReadChanges(0))).version > 0
            assert await service.run(FindKeys(("none",))) == {}
            assert not (await service.run(RevokeKey(books.key_id))).active
            assert (await service.run(GetAccount(books.account_id))).account_id == books.account_id
    finally:
        finish.set()
    await asyncio.gather(*reads)


async def test_the_better_settlement_may_come_after_that_of_a_replica(service: AccountingService, books: Books) -> None:
    """A gateway that a replica took for dead: its reply is kept for retries, and nothing is charged again."""
    await service.settle([books.settlement("r1", outcome=Outcome.CANCELLED)])
    [again] = await service.settle([books.settlement("r1", reply=StoredReply("key", "fingerprint", b"body"))])
    assert isinstance(again, Settled)
    assert (again.duplicate, again.balance) == (True, 10**12 - COST)
    stored = books.ledger.find_reply(books.account_id, "key")
    assert stored is not None
    assert stored.body == b"body"
