"""A gateway dies with usage in its spool: until the ledger has it, its money is not spent and no request runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.contracts.books import Settlement
from serve_app.contracts.calls import shard_of
from serve_app.gateway import settlements
from tests.gateway.connections import Call
from tests.gateway.world import NANO, World, price, settled, until

KEY = {"idempotency-key": "a-retry"}
LEASE_S = 10.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlements, "ADOPT_S", 0.02)


async def dead_and_next(make_world: Callable[..., Any], *, runs: bool, balance: int = NANO) -> tuple[World, World]:
    """A gateway that has died with the usage of one request in its spool, and another; the ledger takes nothing.

    With `runs` the other one ran before, else it starts afterwards.
    """
    dead: World = await make_world(settle_timeout_s=0.02)
    if balance != NANO:
        dead.account_id, dead.key = dead.new_account(credit=balance)
    other: World = await make_world(beside=dead)
    other.accounting.wire_settle.down()
    dead.accounting.wire_settle.down()
    dead.limiter_client.start()
    if runs:
        other.limiter_client.start()
        other.settlements.start()
    assert (await Call(dead, sends=KEY).done()).status == 200
    assert dead.metrics.settlements == ["spooled"]
    await dead.die()
    if not runs:
        other.limiter_client.start()
        other.settlements.start()
    return dead, other


def holder(world: World) -> str | None:
    """The gateway that keeps the request's hold alive; None when nothing is held."""
    [*holds] = world.limiter.service.admission._accounts[world.account_id].holds.values()
    return holds[0].holder if holds else None


async def a_lease_passes(dead: World, other: World) -> None:
    """Advances the clock in steps, so that renewals arrive. `dead` created the limiter and has its clock."""
    admission = dead.limiter.service.admission
    for _ in range(3):
        dead.passed_s += 0.4 * LEASE_S
        now = admission._clock()
        await until(
            lambda now=now: all(hold.expires_at >= now + LEASE_S for hold in admission._open_holds._holds.values())
        )
        assert admission.expire() == []


@pytest.mark.parametrize("runs", [True, False], ids=["another runs", "the next one starts"])
async def test_a_retry_of_a_dead_gateways_request_waits_until_the_reply_is_in_the_ledger(
    make_world: Callable[..., Any], runs: bool
) -> None:
    dead, other = await dead_and_next(make_world, runs=runs)
    await until(lambda: holder(dead) == "gateway-2")
    await a_lease_passes(dead, other)
    early = await Call(other, sends=KEY).done()
    assert (early.status, early.json["error"]["code"]) == (409, "idempotency_in_progress")
    assert 1 <= int(early.headers["retry-after"]) <= 60
    other.accounting.wire_settle.up()
    await until(lambda: other.is_idle)
    again = await Call(other, sends=KEY).done()
    assert again.headers["idempotency-replayed"] == "true"
    assert not other.backends.calls
    await settled(other, requests=1, spent=price(10, 2))


async def test_a_gateway_that_starts_takes_its_holds_over_before_it_asks_for_anything(
    make_world: Callable[..., Any],
) -> None:
    dead, other = await dead_and_next(make_world, runs=True)
    await until(lambda: holder(dead) == "gateway-2")
    # Both are dead and their leases have expired: the next one must announce the holds before it admits the retry.
    await other.die()
    dead.passed_s += 2 * LEASE_S
    assert len(dead.limiter.service.admission.expire()) == 1
    third: World = await make_world(beside=dead)
    third.accounting.wire_settle.down()
    third.settlements.start()
    assert (await Call(third, sends=KEY).done()).status == 409
    assert third.held == price(10, 2)
    third.accounting.wire_settle.up()
    await until(lambda: third.is_idle)
    await settled(third, requests=1, spent=price(10, 2))


async def test_a_dead_gateways_usage_is_not_spent_again_while_the_ledger_is_away(
    make_world: Callable[..., Any],
) -> None:
    dead, other = await dead_and_next(make_world, runs=True, balance=price(10, 2))
    await until(lambda: holder(dead) == "gateway-2")
    await a_lease_passes(dead, other)
    assert (await Call(other).done()).status == 402
    other.accounting.wire_settle.up()
    await until(lambda: other.is_idle)
    assert (other.balance, other.recorded) == (0, 1)
    assert other.books_balance()
    assert (await Call(other).done()).status == 402


async def test_a_dead_gateways_holds_outlive_a_restart_of_the_limiter(make_world: Callable[..., Any]) -> None:
    dead, other = await dead_and_next(make_world, runs=True)
    await until(lambda: holder(dead) == "gateway-2")
    other.limiter.service = other.new_limiter(recovery_s=0.05)
    await other.limiter.service.follow()
    retry = Call(other, sends=KEY)
    await until(lambda: other.held == price(10, 2))
    assert not retry.ended
    other.passed_s += 0.05
    assert (await retry.done()).status == 409
    assert other.held == price(10, 2)
    other.accounting.wire_settle.up()
    await until(lambda: other.is_idle)
    await settled(other, requests=1, spent=price(10, 2))


async def test_holds_go_to_the_limiter_of_their_account(make_world: Callable[..., Any]) -> None:
    dead: World = await make_world(limiter_shards=3, settle_timeout_s=0.02)
    other: World = await make_world(beside=dead)
    accounts: list[tuple[str, str]] = []
    while len({shard_of(account, 3) for account, _ in accounts}) < 3:
        accounts.append(dead.new_account())
    for world in (dead, other):
        world.accounting.wire_settle.down()
        world.limiter_client.start()
    for _, key in accounts:
        assert (await Call(dead, key).done()).status == 200
    held = [len(limiter.service.admission._open_holds) for limiter in dead.limiters]
    assert all(held)
    await dead.die()
    other.settlements.start()
    await until(lambda: other.limiter_client.open_requests == len(accounts))
    admissions = [limiter.service.admission for limiter in dead.limiters]
    await until(
        lambda: {hold.holder for one in admissions for hold in one._open_holds._holds.values()} == {"gateway-2"}
    )
    assert [len(admission._open_holds) for admission in admissions] == held
    other.accounting.wire_settle.up()
    await until(lambda: other.is_idle and not sum(len(admission._open_holds) for admission in admissions))
    assert {dead.ledger.get_account(account).balance for account, _ in accounts} == {NANO - price(10, 2)}


async def test_a_settlement_that_the_ledger_refuses_releases_its_hold(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, other = await dead_and_next(make_world, runs=True)
    await until(lambda: holder(dead) == "gateway-2")

    def refuse(batch: list[Settlement]) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(other.ledger, "settle", refuse)
    other.accounting.wire_settle.up()
    await until(lambda: other.is_idle)
    assert [stuck.refusal for stuck in other.ledger.stuck()] == ["failed"]


async def test_without_a_spool_a_dead_gateways_holds_go_with_their_lease(make_world: Callable[..., Any]) -> None:
    dead: World = await make_world()
    other: World = await make_world(beside=dead)
    dead.backends.play([asyncio.Event()])
    gone = Call(dead, sends=KEY)
    await until(lambda: dead.backends.running)
    await dead.die()
    other.limiter_client.start()
    other.settlements.start()
    assert (await Call(other, sends=KEY).done()).status == 409
    dead.passed_s += LEASE_S
    assert len(dead.limiter.service.admission.expire()) == 1
    assert (await Call(other, sends=KEY).done()).status == 200
    gone.hang_up()
    await gone.done()
