"""While the ledger is away: retries, the spool, the last chunk in time, the replay, and never twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.request import Delta, Started
from serve_app.gateway import outbox
from serve_app.gateway.outbox import Outbox
from serve_app.ledger.errors import LedgerUnavailable
from serve_app.ledger.messages import Outcome, Price, Settled, Settlement, SettlementRejected
from serve_app.ledger.spool import Spool
from tests.gateway.connections import Call
from tests.gateway.world import Counts, World, price, says, until


def settlement(world: World, request_id: str, completion: int = 2) -> Settlement:
    key_id = world.ledger.list_keys(world.account_id)[0].key_id
    return Settlement(
        request_id, world.account_id, key_id, "svc-chat", "fake", Price(1000, 500, 3000), 10, 0, completion,
        Outcome.COMPLETED, 1.0, 2.0,
    )  # fmt: skip


async def test_a_ledger_that_is_back_in_time_is_not_noticed(world: World) -> None:
    world.services.outbox.settle_timeout_s = 5
    world.accounting.wire_settle.down()
    call = Call(world)
    await world.accounting.wire_settle.seen("*").wait()
    world.accounting.wire_settle.up()
    assert (await call.done()).status == 200
    assert world.spent == price(10, 2)
    assert world.spool.size == 0


async def test_with_the_ledger_away_the_client_gets_its_last_chunk_and_the_usage_is_billed_later(world: World) -> None:
    world.outbox.settle_timeout_s = 0.2
    world.outbox.start()
    world.accounting.wire_settle.down()
    call = await Call(world, stream=True).done()
    assert call.data[-1] == "[DONE]"
    assert world.spool.size > 0
    # Until the ledger has it, only the hold stands between this usage and the next request.
    assert world.held >= price(10, 2)
    assert world.open_requests == 1
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (price(10, 2), 1)
    assert "spooled" in world.metrics.settlements
    # What the release brought is the balance after the charge.
    assert world.limiter.service.admission._accounts[world.account_id].free == world.balance


async def test_a_hanging_ledger_delays_nobody_longer_than_the_limit(world: World) -> None:
    world.outbox.settle_timeout_s = 0.2
    world.accounting.wire_settle.hold["*"] = asyncio.Event()
    calls = [Call(world) for _ in range(5)]
    for call in calls:
        assert (await call.done()).status == 200
    world.outbox.start()
    world.accounting.wire_settle.hold.pop("*").set()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (5 * price(10, 2), 5)


async def test_a_settlement_that_took_effect_and_is_spooled_is_charged_once(world: World) -> None:
    world.outbox.settle_timeout_s = 0.2
    world.outbox.start()
    world.accounting.wire_settle.lose.add("*")
    assert (await Call(world).done()).status == 200
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert (world.spent, world.recorded) == (price(10, 2), 1)


async def test_spooling_while_a_replay_ends_is_not_forgotten(world: World) -> None:
    world.outbox.start()
    for number in range(20):
        world.accounting.wire_settle.fail.add(f"r{number}")
        world.outbox.settle_timeout_s = 0.02
        assert await world.outbox.settle(settlement(world, f"r{number}")) is None
        world.accounting.wire_settle.up()
        await asyncio.sleep(0.001 * (number % 4))
    await until(lambda: world.spool.size == 0 and world.recorded == 20)


async def test_the_spool_of_a_dead_gateway_is_adopted_at_the_start(world: World) -> None:
    dead = Spool(world.folder / "spool", "gateway-dead")
    dead.append(settlement(world, "left"))
    dead.close()  # what the death of a process does to its locks
    world.outbox.start()
    await until(lambda: world.recorded == 1)
    assert world.spent == price(10, 2)


async def test_the_spool_of_a_gateway_that_dies_later_is_adopted_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "ADOPT_S", 0.02)
    dead = Spool(world.folder / "spool", "gateway-dead")
    dead.append(settlement(world, "left"))
    world.outbox.start()
    await asyncio.sleep(0.05)
    assert world.recorded == 0
    dead.close()
    await until(lambda: world.recorded == 1)


async def test_a_full_spool_fails_the_request_without_billing_it_and_closes_admission(
    make_world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    world: World = await make_world(settle_timeout_s=0.05)
    world.outbox.spool_max_bytes = 1500  # about three settlements
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
    # From here on nothing is generated that could not be billed.
    world.backends.calls.clear()
    refused = await Call(world).done()
    assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
    assert not world.backends.calls
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)

    world.outbox.start()
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and world.spool.size == 0)
    assert world.spent == kept * price(10, 2)
    await until(lambda: not world.outbox.is_full)
    assert (await Call(world).done()).status == 200


async def test_what_a_gone_client_used_is_billed_although_the_spool_is_full(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(settle_timeout_s=0.05)
    world.outbox.spool_max_bytes = 10
    world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    world.accounting.wire_settle.down()
    call = Call(world, stream=True)
    await call.until('"a"')
    call.hang_up()
    await call.done()
    await until(lambda: world.outbox.is_full)
    assert world.held > 0
    world.accounting.wire_settle.up()
    await until(lambda: world.is_idle and not world.outbox.is_full)
    assert world.spent == price(10, 1)


async def test_one_settlement_that_upsets_the_ledger_does_not_stop_the_others(world: World) -> None:
    real = world.ledger.settle

    def upset(batch: Any) -> Any:
        if any(one.request_id == "poison" for one in batch):
            raise ZeroDivisionError
        return real(batch)

    world.accounting_service._committer._settle = upset
    results = await asyncio.gather(
        *(world.outbox.settle(settlement(world, name)) for name in ("a", "poison", "b")), return_exceptions=True
    )
    assert isinstance(results[0], Settled)
    assert isinstance(results[1], RuntimeError)
    assert isinstance(results[2], Settled)
    # The same out of the spool: it goes aside for a human, the rest is settled.
    for name in ("poison", "c"):
        world.spool.append(settlement(world, name))
    world.outbox.start()
    await until(lambda: world.recorded == 3 and world.spool.size == 0)
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

        async def call(self, operation: str, arguments: dict[str, Any]) -> Any: ...

    box = Outbox(Half(), Spool(tmp_path / "other", "o"), Counts(), world.leases, settle_timeout_s=5)
    results = await asyncio.gather(*(box.settle(settlement(world, name)) for name in ("a", "b", "c")))
    assert [result.request_id for result in results if result] == ["a", "b", "c"]
    assert asked == [["a", "b", "c"], ["b"]]


async def test_limits_that_change_while_running_apply(world: World) -> None:
    world.outbox.settle_timeout_s = 0.03
    world.accounting.wire_settle.hold["*"] = asyncio.Event()
    async with asyncio.timeout(30):
        assert await world.outbox.settle(settlement(world, "r")) is None
    world.outbox.spool_max_bytes = 1
    assert world.outbox.is_full


async def test_a_refused_settlement_in_the_end_does_not_keep_its_hold_for_ever(world: World) -> None:
    class Refusing:
        async def settle(self, batch: list[Settlement]) -> list[Any]:
            from serve_app.ledger.messages import Refusal

            return [SettlementRejected(one.request_id, Refusal.INVALID, "no") for one in batch]

        async def call(self, operation: str, arguments: dict[str, Any]) -> Any: ...

    box = Outbox(Refusing(), world.spool, Counts(), world.leases, settle_timeout_s=5)
    assert await box.settle_for_certain(settlement(world, "r")) is None


async def test_stopping_ends_the_replaying_also_when_there_is_just_something_to_replay(world: World) -> None:
    for _ in range(20):
        world.outbox.start()
        await asyncio.sleep(0.001)
        world.outbox._to_replay.set()  # in the same turn of the loop as the cancellation
        async with asyncio.timeout(30):
            await world.outbox.stop()
