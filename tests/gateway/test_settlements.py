"""While the ledger is away: retries, the spool, the last chunk in time, the replay, and never twice."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.books import Outcome, Refusal, Settled, Settlement, SettlementRejected, StoredReply
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.generation import Delta, Started
from serve_app.contracts.money import Price
from serve_app.gateway import settlements
from serve_app.gateway.settlements import Settlements
from serve_app.storage.spool import Spool
from tests.gateway.connections import Call
from tests.gateway.world import PATIENT_S, Counts, World, price, says, until

BATCH = 16  # that a replay sends at once, where the test sets it


def settlement(world: World, request_id: str, completion: int = 2) -> Settlement:
    key_id = world.ledger.list_keys(world.account_id)[0].key_id
    return Settlement(
        request_id, world.account_id, key_id, "svc-chat", "fake", Price(1000, 500, 3000), 10, 0, completion,
        Outcome.COMPLETED, 1.0, 2.0,
    )  # fmt: skip


async def test_a_ledger_that_is_back_in_time_is_not_noticed(world: World) -> None:
    world.accounting.wire_settle.down()
    call = Call(world)
    await world.accounting.wire_settle.seen("*").wait()
    world.accounting.wire_settle.up()
    assert (await call.done()).status == 200
    assert world.spent == price(10, 2)
    assert world.spool.size == 0


async def test_with_the_ledger_away_the_client_gets_its_last_chunk_and_the_usage_is_billed_later(world: World) -> None:
    world.settlements.settle_timeout_s = 0.02
    world.settlements.start()
    world.accounting.wire_settle.down()
    call = await Call(world, stream=True).done()
    assert call.data[-1] == "[DONE]"
    assert world.spool.size > 0
    # Until the ledger has the usage, only the hold keeps its money from the next request.
    assert world.held >= price(10, 2)
    assert world.open_requests == 1
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (price(10, 2), 1)
    assert "spooled" in world.metrics.settlements
    # The release has set the balance after the charge.
    assert world.limiter.service.admission._accounts[world.account_id].free == world.balance


async def test_a_hanging_ledger_delays_no_request_longer_than_the_limit(world: World) -> None:
    world.settlements.settle_timeout_s = 0.02
    world.accounting.wire_settle.hold["*"] = asyncio.Event()
    calls = [Call(world) for _ in range(5)]
    for call in calls:
        assert (await call.done()).status == 200
    world.settlements.start()
    world.accounting.wire_settle.hold.pop("*").set()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (5 * price(10, 2), 5)


async def test_a_settlement_that_took_effect_and_is_spooled_is_charged_once(
    make_world: Callable[..., Any], let_pass: Callable[[float], None]
) -> None:
    world: World = await make_world(settle_timeout_s=600.0)
    world.settlements.start()
    world.accounting.wire_settle.lose.add("*")
    call = Call(world)
    await until(lambda: world.recorded == 1)
    let_pass(1000.0)
    assert (await call.done()).status == 200
    assert world.metrics.settlements == ["spooled"]
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (price(10, 2), 1)


async def test_a_settlement_spooled_while_a_replay_ends_is_replayed(world: World) -> None:
    world.settlements.start()
    for number in range(8):
        world.accounting.wire_settle.fail.add(f"r{number}")
        world.settlements.settle_timeout_s = 0.02
        assert await world.settlements.settle(settlement(world, f"r{number}")) is None
        world.accounting.wire_settle.up()
        await asyncio.sleep(0.001 * (number % 4))
    await until(lambda: world.spool.size == 0 and world.recorded == 8)


async def test_the_spool_of_a_dead_gateway_is_adopted_at_the_start(world: World) -> None:
    dead = Spool(world.folder / "spool", "gateway-dead")
    dead.append(settlement(world, "left"))
    dead.close()  # the locks are released, as when a process dies
    world.settlements.start()
    await until(lambda: world.recorded == 1)
    assert world.spent == price(10, 2)


async def test_the_spool_of_a_gateway_that_dies_later_is_adopted_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlements, "ADOPT_S", 0.02)
    dead = Spool(world.folder / "spool", "gateway-dead")
    dead.append(settlement(world, "left"))
    looks = 0
    adopt = world.spool.adopt_orphans

    def look() -> list[Settlement]:
        nonlocal looks
        looks += 1
        return adopt()

    monkeypatch.setattr(world.spool, "adopt_orphans", look)
    world.settlements.start()
    await until(lambda: looks > 2)
    assert world.recorded == 0
    dead.close()
    await until(lambda: world.recorded == 1)


async def test_a_full_spool_fails_the_request_without_billing_it_and_closes_admission(
    make_world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    world: World = await make_world(settle_timeout_s=0.05)
    world.settlements.spool.max_bytes = 1500  # about three settlements
    gate = asyncio.Event()
    world.backends.play([gate, *says("Hello", " world")])
    world.accounting.wire_settle.down()
    calls = [Call(world) for _ in range(8)]
    await until(lambda: len(world.backends.calls) == 8)
    gate.set()
    statuses = [(await call.done()).status for call in calls]
    kept = statuses.count(200)
    assert 1 <= kept < 8
    assert set(statuses) == {200, 503}
    # From now on nothing is generated that can't be billed.
    world.backends.calls.clear()
    refused = await Call(world).done()
    assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
    assert not world.backends.calls
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)

    world.settlements.start()
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert world.spent == kept * price(10, 2)
    await until(lambda: not world.settlements.is_full)
    assert (await Call(world).done()).status == 200


async def test_usage_of_a_client_that_left_is_billed_even_if_the_spool_is_full(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(settle_timeout_s=0.05)
    world.settlements.spool.max_bytes = 10
    world.settlements.start()
    world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    world.accounting.wire_settle.down()
    call = Call(world, stream=True)
    await call.until('"a"')
    call.hang_up()
    await call.done()
    await until(lambda: world.settlements.is_full)
    assert world.held > 0
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and not world.settlements.is_full)
    assert world.spent == price(10, 1)


async def test_one_settlement_that_the_ledger_rejects_does_not_stop_the_others(world: World) -> None:
    real = world.ledger.settle

    def upset(batch: Any) -> Any:
        if any(one.request_id == "poison" for one in batch):
            raise ZeroDivisionError
        return real(batch)

    world.ledger.settle = upset  # type: ignore[method-assign]
    results = await asyncio.gather(
        *(world.settlements.settle(settlement(world, name)) for name in ("a", "poison", "b")), return_exceptions=True
    )
    assert isinstance(results[0], Settled)
    assert results[1] is None, "the ledger keeps it for an operator"
    assert isinstance(results[2], Settled)
    # The same from the spool: the ledger keeps the settlement for an operator, the rest is settled.
    for name in ("poison", "c"):
        world.spool.append(settlement(world, name))
    world.settlements.start()
    await until(lambda: world.recorded == 3 and world.spool.size == 0)
    assert not list((world.folder / "spool").glob("*.refused"))
    world.ledger.settle = real  # type: ignore[method-assign]
    [stuck] = world.ledger.stuck()
    assert (stuck.stuck_id, stuck.tries) == ("poison", 2)
    assert world.ledger.retry_stuck(("poison",)) == []
    assert world.recorded == 4


async def test_what_the_ledger_neither_settles_nor_keeps_is_an_error_and_set_aside(world: World) -> None:
    def upset(*_: Any) -> Any:
        raise ZeroDivisionError

    world.ledger.settle = world.ledger.keep_stuck = upset  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="refuses settlement poison"):
        await world.settlements.settle(settlement(world, "poison"))
    world.spool.append(settlement(world, "poison"))
    world.settlements.start()
    await until(lambda: world.spool.size == 0)
    assert list((world.folder / "spool").glob("*.refused"))


async def test_one_answer_that_is_missing_is_asked_again_alone(world: World, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    class Half:
        async def settle(self, batch: list[Settlement]) -> list[Any]:
            asked.append([one.request_id for one in batch])
            return [
                LedgerUnavailable("not this one") if one.request_id == "b" and len(asked) == 1
                else Settled(one.request_id, 1, 1, 1)
                for one in batch
            ]  # fmt: skip

        async def run(self, command: Any) -> Any: ...

    box = Settlements(
        AccountingShards([Half()]),
        Spool(tmp_path / "other", "o"),
        Counts(),
        world.limiter_client,
        settle_timeout_s=PATIENT_S,
    )
    results = await asyncio.gather(*(box.settle(settlement(world, name)) for name in ("a", "b", "c")))
    assert [result.request_id for result in results if result] == ["a", "b", "c"]
    assert asked == [["a", "b", "c"], ["b"]]


async def test_limits_that_change_while_running_apply(world: World) -> None:
    world.settlements.settle_timeout_s = 0.03
    world.accounting.wire_settle.hold["*"] = asyncio.Event()
    async with asyncio.timeout(60):
        assert await world.settlements.settle(settlement(world, "r")) is None
    world.settlements.spool.max_bytes = 1
    assert world.settlements.is_full


async def test_a_settlement_refused_at_the_last_attempt_does_not_keep_its_hold(world: World) -> None:
    world.settlements.settle_timeout_s = 0.05
    world.accounting.wire_settle.down()
    assert (await Call(world).done()).status == 200
    assert world.open_requests == 1

    def refuse(batch: list[Settlement]) -> list[Any]:
        return [SettlementRejected(one.request_id, Refusal.INVALID, "no", kept=True) for one in batch]

    world.ledger.settle = refuse  # type: ignore[method-assign, assignment]
    world.accounting.wire_settle.up()
    world.settlements.start()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert not list((world.folder / "spool").glob("*.refused")), "the ledger keeps it"


class Ledger:
    """AccountingPort: settles `most` at a time, each call in a turn of the loop; `away` fails and `hangs` waits."""

    def __init__(self) -> None:
        self.away = self.hangs = False
        self.sent: list[str] = []
        self.settled: dict[str, int] = {}
        self.woken = asyncio.Event()

    async def settle(self, batch: list[Settlement]) -> list[Any]:
        self.sent += [one.request_id for one in batch]
        if self.hangs:
            await self.woken.wait()
        if self.away:
            raise Unavailable("no ledger")
        await asyncio.sleep(0)
        for one in batch:
            self.settled[one.request_id] = self.settled.get(one.request_id, 0) + 1
        return [Settled(one.request_id, 1, 1, 1) for one in batch]

    async def run(self, command: Any) -> Any: ...


class Releases:
    """The part of a LimiterClient that Settlements needs."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def release(self, release: Any) -> None:
        self.released.append(release.request_id)

    def adopt(self, holds: Any) -> None: ...

    def disown(self, request_ids: Any) -> None: ...


def plain(request_id: str, reply: StoredReply | None = None) -> Settlement:
    return Settlement(
        request_id, "acct", "key", "svc-chat", "fake", Price(1000, 500, 3000), 10, 0, 2, Outcome.COMPLETED, 1.0, 2.0,
        reply=reply,
    )  # fmt: skip


def over(ledger: Ledger, folder: Path, limiter: Releases, timeout_s: float) -> Settlements:
    spool = Spool(folder, "gateway")
    return Settlements(AccountingShards([ledger]), spool, Counts(), limiter, settle_timeout_s=timeout_s)  # type: ignore


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlements, "REPLAY_BATCH", BATCH)


@pytest.mark.parametrize("fault", ["away", "hangs"])
async def test_during_an_outage_each_settlement_waits_in_one_place(
    tmp_path: Path, small_batches: None, fault: str
) -> None:
    """Checks that the ledger gets the missed settlements once after an outage, and not their repetitions."""
    ledger, limiter = Ledger(), Releases()
    setattr(ledger, fault, True)
    gateway = over(ledger, tmp_path, limiter, 0.03)
    gateway.start()
    names = [f"r{number:03}" for number in range(100)]
    for first in range(0, 100, 10):
        await asyncio.gather(*(gateway.settle(plain(name)) for name in names[first : first + 10]))
        assert not any(calls._waiting for calls in gateway._calls), "what is in the spool is not in memory too"
    assert gateway.spool.waiting == 100
    # The outage was noticed by the first ones: the others have not asked the ledger at all.
    assert set(ledger.sent) <= set(names[:BATCH])
    assert not limiter.released
    setattr(ledger, fault, False)
    ledger.woken.set()
    ledger.sent.clear()
    await until(lambda: gateway.spool.waiting == 0)
    assert sorted(set(limiter.released)) == names
    assert len(ledger.sent) <= len(names) + BATCH
    # Back to normal: no way through the spool.
    gateway.settle_timeout_s = PATIENT_S
    assert await gateway.settle(plain("after")) is not None
    await gateway.stop()


async def test_after_an_outage_live_settlements_do_not_wait_for_the_spool(tmp_path: Path, small_batches: None) -> None:
    """They take turns: whatever the spool holds, at most one of its batches is before a live one."""
    ledger, limiter = Ledger(), Releases()
    ledger.away = True
    gateway = over(ledger, tmp_path, limiter, 0.03)
    gateway.start()
    await asyncio.gather(*(gateway.settle(plain(f"r{number}")) for number in range(20 * BATCH)))
    gateway.settle_timeout_s = PATIENT_S
    ledger.sent.clear()
    ledger.away = False
    await until(lambda: ledger.settled)
    live = 0
    while gateway.spool.waiting:
        before = len(ledger.sent)
        assert await gateway.settle(plain(f"live{live}")) is not None
        assert len(ledger.sent) - before <= 2 * BATCH + 1
        live += 1
        await asyncio.sleep(0)
    assert live > 5
    await until(lambda: len(ledger.settled) == 20 * BATCH + live)
    await gateway.stop()


async def test_what_waits_for_the_disk_at_the_same_time_shares_one_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    ledger.away = True
    gateway = over(ledger, tmp_path, Releases(), 0.03)
    flushes: list[int] = []
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (flushes.append(descriptor), flush(descriptor)))
    await asyncio.gather(*(gateway.settle(plain(f"r{number}")) for number in range(50)))
    assert gateway.spool.waiting == 50
    assert len(flushes) < 10


async def test_a_settlement_that_fails_in_the_gateway_does_not_keep_its_hold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.settlements, "_from_ledger", fault)
    assert (await Call(world).done()).status == 500
    await until(lambda: world.is_idle)


async def test_stopping_ends_the_replay_task_even_when_a_replay_is_due(world: World) -> None:
    for _ in range(5):
        world.settlements.start()
        await asyncio.sleep(0.001)
        world.settlements._to_replay.set()  # in the same turn of the loop as the cancellation
        async with asyncio.timeout(60):
            await world.settlements.stop()


async def test_a_gateway_that_ends_replays_what_one_slow_commit_has_left(world: World) -> None:
    """The ledger is well again: a machine that goes with its disk must not take usage along."""
    world.settlements.settle_timeout_s = 0.02
    world.settlements.start()
    world.accounting.wire_settle.down()
    assert (await Call(world).done()).status == 200
    assert world.spool.waiting == 1
    world.accounting.wire_settle.up()
    await world.settlements.stop(within_s=PATIENT_S)
    assert world.spool.waiting == 0
    assert (world.spent, world.recorded) == (price(10, 2), 1)


async def test_a_spool_is_replayed_through_any_accounting_process_that_is_there(tmp_path: Path) -> None:
    """All write one ledger: one that restarts does not hold up the accounts of the others."""
    shards = [Ledger(), Ledger()]
    for shard in shards:
        shard.away = True
    gateway = Settlements(
        AccountingShards(shards),
        Spool(tmp_path, "gateway"),
        Counts(),
        Releases(),
        settle_timeout_s=0.03,  # type: ignore
    )
    gateway.start()
    names = [f"r{number}" for number in range(20)]
    accounts = [replace(plain(name), account_id=f"acct{name}") for name in names]
    assert await asyncio.gather(*map(gateway.settle, accounts)) == [None] * 20
    shards[1].away = False
    await until(lambda: gateway.spool.waiting == 0)
    assert shards[1].settled == dict.fromkeys(names, 1)
    await gateway.stop()


async def test_a_gateway_that_ends_leaves_a_spool_only_if_something_waits_in_it(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.away = True
    waits, done = over(ledger, tmp_path / "waits", Releases(), 0.03), over(Ledger(), tmp_path / "done", Releases(), 30)
    for gateway in (waits, done):
        await gateway.settle(plain("r"))
        await gateway.stop()
        await gateway.close()
    assert [file.name for file in (tmp_path / "waits").iterdir()] == ["gateway.spool"]
    assert not list((tmp_path / "done").iterdir())
