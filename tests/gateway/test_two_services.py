"""Two services on one ledger: one limiter admits at a time, and knows what is open at the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from serve_app.accounting import limiter_leases
from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.contracts.limiting import Grant
from serve_app.gateway import limiter_client
from serve_app.limiter import admission, limiter_service
from serve_app.limiter.tenure import Tenure
from tests.gateway.connections import Call
from tests.gateway.world import PATIENT_S, World, price, until

RECOVERY_S = 0.05
LASTS_S = 600.0  # of a lease
LONG_AGO_S = 10.0  # demand that is older does not count
KEY = {"idempotency-key": "7d6e1c0e-61c5-4f0c"}


@pytest.fixture
async def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, World]]:
    """Each with gateway, limiter, and accounting of its own; the first one admits.

    They look at the lease, and time passes on their clock, only when a test lets them.
    """
    monkeypatch.setattr(limiter_client, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(limiter_leases, "LOOK_S", 2 * LASTS_S)
    for module in (admission, limiter_service):
        monkeypatch.setattr(module, "AWAIT_LEASE_S", 0.01)
    a, b = made = [World(tmp_path / name, tmp_path / "ledger.db") for name in "ab"]
    for world, name in zip(made, "ab", strict=True):
        world.accounting_service._leases._clock = world.clock
        await new_limiter(world, name)
        world.limiter_client.holder = f"gateway-{name}"
        world.limiter_client.start()
    a.account_id, a.key = b.account_id, b.key = a.new_account()
    await takes_over(a, b)
    yield a, b
    for world in made:
        await world.limiter.service.stop()
        await world.stop()


async def new_limiter(world: World, name: str) -> None:
    service = world.new_limiter(recovery_s=RECOVERY_S, lease_s=LASTS_S, shards=1)
    await service.follow()
    service.start()
    service.tenure = Tenure(
        service,
        world.accounting,
        shard=0,
        shards=1,
        lasts_s=LASTS_S,
        clock=world.clock,
        process=name,
        ended=lambda _: False,
    )
    world.limiter.service = service


def passes(seconds: float, *services: World) -> None:
    for world in services:
        world.passed_s += seconds


def tenure(world: World) -> Tenure:
    assert world.limiter.service.tenure is not None
    return world.limiter.service.tenure


async def takes_over(one: World, other: World) -> None:
    """The lease goes to `one`, which then admits."""
    for _ in range(3):
        await tenure(one).turn()
        if tenure(one).epoch is not None:
            break
        await tenure(other).turn()
    passes(RECOVERY_S, one, other)
    await tenure(one).turn()
    assert admits(one)


async def wanted(call: Call, one: World, other: World) -> Call:
    """The end of a request for which the other service gives its lease away."""
    await until(one.limiter.service.demand)
    await takes_over(one, other)
    return await call.done()


async def learns(world: World, look: Callable[[], bool]) -> None:
    """Renewals bring what happened at the other service."""
    async with asyncio.timeout(60):
        while not look():
            await tenure(world).turn()
            await asyncio.sleep(0.002)


def admits(world: World) -> bool:
    return world.limiter.service.admission.admits


def running(world: World) -> asyncio.Event:
    """The next request of this service runs until the event is set."""
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate, Finished(FinishReason.STOP, 10, 0, 1)])
    return gate


async def test_traffic_that_moves_to_the_other_service_and_back_loses_and_doubles_nothing(
    services: tuple[World, World],
) -> None:
    requests = 0
    for turn in range(3):
        one, other = services[turn % 2], services[1 - turn % 2]
        passes(LONG_AGO_S, *services)
        assert (await wanted(Call(one), one, other)).status == 200
        requests += 1
        for _ in range(2):
            assert (await Call(one).done()).status == 200
            requests += 1
            assert [admits(world) for world in services].count(True) == 1
    assert services[0].recorded == requests
    assert services[0].spent == requests * price(10, 2)
    assert [world.limiter.service.admission.epoch for world in services] == [3, 2]


async def test_what_is_open_at_the_other_service_can_not_be_spent_again(services: tuple[World, World]) -> None:
    a, b = services
    credit = price(0, 50)
    account_id, key = a.new_account(credit)
    gate = running(a)
    first = Call(a, key, stream=True, max_tokens=40)
    await first.until('"a"')
    passes(LONG_AGO_S, a, b)
    assert (await wanted(Call(b, key, max_tokens=40), b, a)).status == 200
    held = [world.backends.calls[0].credit for world in services]
    assert sum(held) <= credit
    gate.set()
    await first.done()
    await learns(b, lambda: not b.limiter.service.admission.status(account_id).held)
    assert (await Call(b, key, max_tokens=30).done()).status == 200
    assert b.backends.calls[1].credit > held[1], "what the other service did not use"
    assert all(row.uncollected == 0 for row in a.ledger.export_usage().rows)


async def test_a_retry_at_the_other_service_waits_for_the_request_and_is_billed_once(
    services: tuple[World, World],
) -> None:
    a, b = services
    gate = running(a)
    first = Call(a, sends=KEY)
    await until(lambda: a.backends.running)
    passes(LONG_AGO_S, a, b)
    assert (await wanted(Call(b, sends=KEY), b, a)).status == 409
    gate.set()
    await first.done()
    again = await Call(b, sends=KEY).done()
    assert (first.status, again.status, again.body) == (200, 200, first.body)
    assert again.headers["idempotency-replayed"] == "true"
    assert b.backends.calls == []
    await until(lambda: a.recorded == 1)
    assert a.spent == price(10, 1)


async def test_a_limiter_that_falls_silent_is_succeeded_by_one_that_knows_its_gateways_holds(
    services: tuple[World, World],
) -> None:
    a, b = services
    gate = running(a)
    first = Call(a, sends=KEY)
    await until(lambda: a.backends.running)
    stopped = a.limiter.service
    for task in stopped._tasks:  # the process stands still
        task.cancel()
    a.limiter.wire.down()
    await until(lambda: a.limiter_client._shards[0]._posted)  # its gateway says in the ledger what is open
    await tenure(b).turn()
    passes(LASTS_S, a, b)
    await tenure(b).turn()
    passes(RECOVERY_S, a, b)
    await tenure(b).turn()
    assert admits(b)
    assert not stopped.admission.admits
    assert b.open_requests == 1
    assert (await Call(b, sends=KEY).done()).status == 409
    gate.set()
    await first.done()
    await learns(b, lambda: b.open_requests == 0)
    assert (await Call(b, sends=KEY).done()).body == first.body
    a.limiter.wire.up()
    a.limiter_client.admit_timeout_s = 0.1
    assert (await Call(a).done()).status == 503, "it asks the ledger no more, and its lease is over"
    assert a.recorded == 1


async def test_a_request_that_is_given_back_frees_its_hold_at_the_other_service(
    services: tuple[World, World],
) -> None:
    a, b = services
    gate = asyncio.Event()
    a.backends.play([gate, Finished(FinishReason.DEADLINE, 0, 0, 0)])
    first = Call(a)
    await until(lambda: a.backends.running)
    passes(LONG_AGO_S, a, b)
    assert (await wanted(Call(b), b, a)).status == 200
    assert b.open_requests == 1
    gate.set()
    assert (await first.done()).status == 503
    await learns(b, lambda: b.open_requests == 0)
    assert b.spent == price(10, 2)


# Grants that come too late


async def late(world: World, after_s: float) -> None:
    """The limiter's next answers to Admit come so late, on the gateway's clock."""
    passed = 0.0
    ask = world.limiter.service.ask

    async def slowly(asks: list[object]) -> list[object]:
        nonlocal passed
        answers = await ask(asks)  # type: ignore[arg-type]
        if any(isinstance(answer, Grant) for answer in answers) and not passed:
            passed = after_s
        return answers

    clock = limiter_client.boottime
    limiter_client.boottime = lambda: clock() + passed  # type: ignore[assignment]
    world.limiter.service.ask = slowly  # type: ignore[method-assign, assignment]


async def test_a_grant_that_comes_late_is_asked_for_again(
    make_world: Callable[..., Awaitable[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world()
    assert (await Call(world).done()).status == 200
    monkeypatch.setattr(limiter_client, "boottime", limiter_client.boottime)
    await late(world, PATIENT_S + 1)
    world.limiter.asked.clear()
    assert (await Call(world).done()).status == 200
    asked = [ask for ask in world.limiter.asked if type(ask).__name__ == "Admit"]
    assert len(asked) == 2
    assert asked[0] == asked[1]
    await until(lambda: world.is_idle)


async def test_a_grant_of_an_epoch_that_has_ended_is_not_used(make_world: Callable[..., Awaitable[World]]) -> None:
    world = await make_world()
    admission = world.limiter.service.admission
    admission.epoch = 5
    assert (await Call(world).done()).status == 200
    admission.epoch = 4
    world.limiter_client.admit_timeout_s = 0.1
    assert (await Call(world).done()).status == 503
    admission.epoch = 6
    assert (await Call(world).done()).status == 200
