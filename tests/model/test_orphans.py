"""The settlement of a cut stream is repeated until the ledger has accepted or refused it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.books import Outcome, Refusal, Settled, Settlement, SettlementRejected
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.contracts.trace_context import TraceCall
from serve_app.model import orphans
from serve_app.model.orphans import Orphans, Seen
from serve_app.model.replica import Replica
from serve_app.storage.spool import ORPHANS, Spool
from tests.model.test_replica import ScriptedEngine, a_call

SETTLED = Settled("r", 30, 70, 2)


class Books:
    """Gives each try the next of `answers`, an exception by raising it; the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.tries: list[Settlement] = []

    async def settle(self, settlements: list[Settlement]) -> list[Any]:
        self.tries += settlements
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RuntimeError):
            raise answer
        return [answer]


async def settled_by(books: Books, monkeypatch: pytest.MonkeyPatch) -> list[Settlement]:
    monkeypatch.setattr(orphans, "RETRY_S", 0.0)
    due = Orphans(books.settle)
    due.settle_later(a_call(), Finished(FinishReason.ABORT, 10, 2, 3), started_at=1.0)
    await due.drain()
    return books.tries


async def test_a_settlement_is_repeated_while_the_ledger_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = await settled_by(Books(RuntimeError("no handle"), LedgerUnavailable("busy"), SETTLED), monkeypatch)
    assert len(tries) == 3
    assert len(set(map(repr, tries))) == 1, "the same settlement each time"
    assert not caplog.records


async def test_a_settlement_that_the_ledger_refuses_is_logged_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        len(await settled_by(Books(SettlementRejected("r", Refusal.ACCOUNT_NOT_FOUND, "no such account")), monkeypatch))
        == 1
    )
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "no such account" in caplog.text


@pytest.mark.parametrize("failure", [RuntimeError("no handle"), LedgerUnavailable("busy")], ids=repr)
async def test_a_settlement_that_fails_for_a_minute_is_logged(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = await settled_by(Books(failure), monkeypatch)
    assert len(tries) == orphans.TRIES
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(failure) in caplog.text
    # Where this usage can still be found.
    assert repr(tries[0]) in caplog.text


class Ledger:
    """The accounting that replicas reach: what it has settled, and whether it is away."""

    def __init__(self) -> None:
        self.settled: dict[str, Settlement] = {}
        self.away = False
        self.asked = 0

    async def settle(self, settlements: list[Settlement]) -> list[Any]:
        if self.away:
            return [LedgerUnavailable("no database") for _ in settlements]
        for each in settlements:
            self.settled.setdefault(each.request_id, each)
        return [Settled(each.request_id, 30, 70, 2) for each in settlements]

    async def unsettled(self, request_ids: tuple[str, ...]) -> list[str]:
        self.asked += 1
        if self.away:
            raise LedgerUnavailable("no database")
        return [each for each in request_ids if each not in self.settled]


class Node:
    """A folder of spools, a clock, and a ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.ledger = Ledger()
        self.started = 0

    def orphans(self, settled: Callable[[Settlement, Seen | None], None] = lambda _, __: None) -> Orphans:
        """Returns the Orphans of a process that starts now."""
        self.started += 1
        spool = Spool(self.folder, f"replica-{self.started}", suffix=ORPHANS, flushed=False)
        return Orphans(self.ledger.settle, spool, self.ledger.unsettled, settled=settled, clock=lambda: self.now)

    def kill(self, due: Orphans) -> None:
        assert due.spool is not None
        due.spool.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def finish(due: Orphans, request_id: str = "r", seen: Seen | None = None) -> bool:
    call = replace(a_call(), request_id=request_id, settle_after_s=2.0)
    return due.write_ahead(call, Finished(FinishReason.STOP, 10, 2, 3), 999.0, seen)


async def test_a_finished_reply_is_on_disk_before_its_last_event_leaves(node: Node) -> None:
    due = node.orphans()
    engine = ScriptedEngine(Started(10, 2), Delta("abc", 3), Finished(FinishReason.STOP, 10, 2, 3))
    replica = Replica(engine, node.ledger.settle, orphans=due)  # type: ignore[arg-type]
    async for event in replica.generate(a_call()):
        if isinstance(event, Finished):
            break
    node.kill(due)  # gateway, limiter and accounting are killed in the same moment
    [left] = node.orphans().spool.adopt_orphans()  # type: ignore[union-attr]
    assert (left.request_id, left.prompt_tokens, left.cached_tokens, left.completion_tokens) == ("r", 10, 2, 3)


@pytest.mark.parametrize("is_cut", [True, False])
async def test_what_is_settled_for_a_dead_gateway_comes_with_trace_replica_and_times(node: Node, is_cut: bool) -> None:
    told: list[tuple[str, Seen | None]] = []
    due = node.orphans(lambda one, seen: told.append((one.request_id, seen)))
    script = [Started(10, 2), Delta("abc", 3), asyncio.Event() if is_cut else Finished(FinishReason.STOP, 10, 2, 3)]
    replica = Replica(ScriptedEngine(*script), node.ledger.settle, orphans=due, name="replica-7")  # type: ignore[arg-type]
    call = replace(a_call(), trace=TraceCall("a" * 32, "b" * 16, 30.0))
    async with contextlib.aclosing(replica.generate(call)) as events:
        async for event in events:
            if isinstance(event, Delta if is_cut else Finished):
                break
    node.now += 60
    await due.settle_due()
    [(request_id, seen)] = told
    assert seen is not None
    assert (request_id, seen.replica, seen.trace_id) == ("r", "replica-7", "a" * 32)
    assert None not in (seen.queue_s, seen.prefill_s, seen.decode_s)


async def test_what_is_known_of_replies_stays_bounded_while_the_ledger_is_away(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "MAX_SEEN", 2)
    told: dict[str, Seen | None] = {}
    due = node.orphans(lambda one, seen: told.update({one.request_id: seen}))
    for number in range(3):
        assert finish(due, f"r{number}", Seen(f"replica-{number}"))
    node.now += 60
    await due.settle_due()
    assert told == {"r0": None, "r1": Seen("replica-1"), "r2": Seen("replica-2")}


async def test_what_a_dead_replica_left_is_settled_once_by_another_process(node: Node) -> None:
    first = node.orphans()
    for number in range(5):
        assert finish(first, f"r{number}")
    node.kill(first)
    node.now += 30
    second = node.orphans()
    await second.settle_due()
    assert not node.ledger.settled, "gateways that come back replay their spools first"
    node.now += 31
    await second.settle_due()
    await second.settle_due()
    assert sorted(node.ledger.settled) == [f"r{number}" for number in range(5)]
    assert second.spool is not None
    assert second.spool.waiting == 0


async def test_what_the_gateway_settles_is_not_settled_again(node: Node) -> None:
    due = node.orphans()
    finish(due)
    theirs = await gateway_settles(node, "r")
    await due.settle_due()
    assert due.spool is not None
    assert due.spool.waiting == 1
    node.now += 2
    await due.settle_due()
    assert due.spool.waiting == 0
    assert node.ledger.settled == {"r": theirs}


async def test_a_gateway_that_lives_comes_first(node: Node) -> None:
    due = node.orphans()
    finish(due)
    for _ in range(19):
        node.now += 0.1
        await due.settle_due()
    assert not node.ledger.settled
    node.now += 0.2
    await due.settle_due()
    assert list(node.ledger.settled) == ["r"]


async def test_after_an_outage_the_spools_of_gateways_come_first(node: Node) -> None:
    due = node.orphans()
    node.ledger.away = True
    for number in range(4):
        node.now += 1.0
        finish(due, f"r{number}")
    node.now += 296.0
    await due.settle_due()
    node.ledger.away = False
    await due.settle_due()
    node.now += 290.0
    await due.settle_due()
    assert not node.ledger.settled, "they have as long as the outage took"
    theirs = await gateway_settles(node, "r1")
    node.now += 11.0
    await due.settle_due()
    assert sorted(node.ledger.settled) == ["r0", "r1", "r2", "r3"]
    assert node.ledger.settled["r1"] is theirs


async def test_during_an_outage_the_ledger_is_asked_once_a_turn(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    due = node.orphans()
    node.ledger.away = True
    for number in range(500):
        finish(due, f"r{number}")
    node.now += 60
    for turn in range(5):
        await due.settle_due()
        assert node.ledger.asked == turn + 1
    assert len(caplog.records) == 1


async def test_a_failed_or_cut_reply_is_not_written_as_finished(node: Node) -> None:
    due = node.orphans()
    for reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE):
        assert not due.write_ahead(a_call(), Finished(reason, 10, 2, 3), started_at=1.0)
    assert due.spool is not None
    assert due.spool.waiting == 0


async def test_a_cut_stream_is_kept_on_disk(node: Node) -> None:
    due = node.orphans()
    due.settle_later(replace(a_call(), settle_after_s=2.0), Finished(FinishReason.ABORT, 10, 2, 3), started_at=1.0)
    node.kill(due)
    [left] = node.orphans().spool.adopt_orphans()  # type: ignore[union-attr]
    assert (left.outcome, left.completion_tokens) == ("cancelled", 3)


async def test_a_full_spool_does_not_fail_the_reply(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    due = node.orphans()
    assert due.spool is not None
    due.spool.max_bytes = 10
    assert not finish(due)
    assert "request_id='r'" in caplog.text


async def test_a_replica_that_ends_leaves_nothing_that_the_ledger_takes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "DRAIN_S", 60.0)
    due = node.orphans()
    for name in ("r1", "r2"):
        finish(due, name)
    theirs = await gateway_settles(node, "r1")

    async def time_passes() -> None:
        while True:
            await asyncio.sleep(0.01)
            node.now += 0.1

    passing = asyncio.create_task(time_passes())
    await due.drain()
    passing.cancel()
    assert sorted(node.ledger.settled) == ["r1", "r2"]
    assert node.ledger.settled["r1"] is theirs
    assert not list(node.folder.iterdir())


async def gateway_settles(node: Node, request_id: str) -> Settlement:
    bill = a_call().bill
    settlement = Settlement(
        request_id, bill.account_id, bill.key_id, bill.model, bill.backend, bill.price, 10, 2, 3, Outcome.COMPLETED,
        999.0, node.now,
    )  # fmt: skip
    await node.ledger.settle([settlement])
    return settlement
