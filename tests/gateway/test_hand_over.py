"""A gateway leaves while the ledger is away: another one takes its usage and holds, and each reply is billed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts import accounting_shards
from serve_app.contracts.books import Settlement
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.generation import Delta, Started
from serve_app.gateway import settlements
from tests.gateway.connections import Call
from tests.gateway.test_adoption import KEY, holder
from tests.gateway.test_settlements import Ledger, Releases, over, plain
from tests.gateway.world import PATIENT_S, World, price, settled, until

Pair = tuple[World, World]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlements, "ADOPT_S", 0.02)


@pytest.fixture
async def pair(make_world: Callable[..., Any]) -> Pair:
    """A gateway and another one, both running; the ledger takes nothing."""
    leaver: World = await make_world(settle_timeout_s=0.02)
    other: World = await make_world(beside=leaver)
    for world in (leaver, other):
        world.accounting.wire_settle.down()
        world.limiter_client.start()
        world.settlements.start()
    return leaver, other


async def leave(leaver: World, take_over: Callable[[list[Settlement]], Any]) -> None:
    """As a gateway's process does at its end."""
    await leaver.settlements.stop()
    await leaver.settlements.hand_over(take_over, PATIENT_S)
    await leaver.settlements.close()
    leaver.is_dead = not leaver.settlements.pending  # its spool is closed


def ledger_is_back(*worlds: World) -> None:
    for world in worlds:
        world.accounting.wire_settle.up()


async def test_another_gateway_has_the_usage_and_the_hold_before_one_leaves(pair: Pair) -> None:
    leaver, other = pair
    assert (await Call(leaver, sends=KEY).done()).status == 200
    await leave(leaver, other.settlements.take_over)
    assert [path.name for path in (leaver.folder / "spool").iterdir()] == ["gateway-2.spool"]
    assert (other.spool.waiting, leaver.limiter_client.open_requests) == (1, 0)
    await until(lambda: holder(leaver) == "gateway-2")
    await leaver.limiter_client.stop()
    assert (await Call(other, sends=KEY).done()).status == 409
    ledger_is_back(other)
    await until(lambda: other.is_idle)
    assert (await Call(other, sends=KEY).done()).headers["idempotency-replayed"] == "true"
    await settled(other, requests=1, spent=price(10, 2))


async def test_what_no_gateway_has_room_for_stays_on_the_disk_and_is_adopted(pair: Pair) -> None:
    leaver, other = pair
    assert (await Call(leaver).done()).status == 200
    other.spool.max_bytes = 10
    await leave(leaver, other.settlements.take_over)
    assert (leaver.spool.waiting, other.spool.waiting) == (1, 0)
    await until(lambda: holder(leaver) == "gateway-1")
    await leaver.die()
    await until(lambda: other.spool.waiting == 1)
    ledger_is_back(other)
    await settled(other, requests=1, spent=price(10, 2))


@pytest.mark.parametrize("reached", [True, False], ids=["the answer is lost", "the call is lost"])
async def test_a_hand_over_that_fails_bills_nothing_twice(pair: Pair, reached: bool) -> None:
    leaver, other = pair
    for _ in range(3):
        assert (await Call(leaver).done()).status == 200

    async def lost(batch: list[Settlement]) -> bool:
        if reached:
            assert await other.settlements.take_over(batch)
        raise Unavailable("no answer")

    await leave(leaver, lost)
    assert leaver.spool.waiting == 3
    await leaver.die()
    await until(lambda: other.spool.waiting == (6 if reached else 3))
    ledger_is_back(other)
    await settled(other, requests=3, spent=3 * price(10, 2))
    assert other.books_balance()


async def test_usage_that_no_spool_had_room_for_is_handed_over_too(pair: Pair) -> None:
    leaver, other = pair
    leaver.spool.max_bytes = 10
    leaver.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(leaver, stream=True)
    await call.until('"a"')
    call.hang_up()
    await call.done()
    await until(lambda: leaver.settlements.is_full)
    await leave(leaver, other.settlements.take_over)
    assert (leaver.settlements.pending, other.spool.waiting) == (0, 1)
    await leaver.limiter_client.stop()
    ledger_is_back(other)
    await settled(other, requests=1, spent=price(10, 1))


async def test_a_ledger_that_hangs_does_not_keep_a_gateway_from_handing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting_shards, "SETTLE_TIMEOUT_S", 600.0)
    ledger, taken = Ledger(), list[str]()
    ledger.hangs = True
    gateway = over(ledger, tmp_path, Releases(), 0.03)
    gateway.start()
    await gateway.settle(plain("r1"))
    await until(lambda: len(ledger.sent) == 2)  # the request's own call, and the replay that hangs

    async def take_over(batch: list[Settlement]) -> bool:
        taken.extend(one.request_id for one in batch)
        return True

    async with asyncio.timeout(PATIENT_S):
        await gateway.stop()
        await gateway.hand_over(take_over, PATIENT_S)
    assert (taken, gateway.pending) == (["r1"], 0)


async def test_a_gateway_that_hangs_does_not_keep_another_from_leaving(
    tmp_path: Path, let_pass: Callable[[float], None]
) -> None:
    ledger, asked = Ledger(), asyncio.Event()
    ledger.away = True
    gateway = over(ledger, tmp_path, Releases(), 0.03)
    gateway.start()
    await gateway.settle(plain("r1"))
    await gateway.stop()

    async def hang(_: list[Settlement]) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    leaving = asyncio.create_task(gateway.hand_over(hang, 600.0))
    await asked.wait()
    let_pass(1000.0)
    async with asyncio.timeout(PATIENT_S):
        await leaving
        # Its file can be adopted at once: no thread holds it.
        await asyncio.to_thread(gateway.spool.close)
    assert gateway.pending == 1


async def test_a_gateway_that_leaves_or_has_not_started_takes_nothing(tmp_path: Path) -> None:
    gateway = over(Ledger(), tmp_path, Releases(), PATIENT_S)
    assert not await gateway.take_over([plain("r1")])
    gateway.start()
    await gateway.stop()
    assert not await gateway.take_over([plain("r1")])
    assert gateway.pending == 0
