"""Holds that live as long as their requests, through restarts of the limiter; keys that follow the ledger."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.engine.request import Delta, Started
from serve_app.ledger import keys
from serve_app.limits.messages import Admit, Grant, Identify, Identity, Recovering, Refusal, Release, Status
from tests.gateway.connections import Call
from tests.gateway.world import SECRET, World, price, until


def digest(key: str) -> str:
    return keys.digest(key, SECRET)


def admit(world: World, key: str, request_id: str = "r") -> Admit:
    return Admit(request_id, "g", digest(key), "svc-chat", 10, 10, 1000, 3000)


# Leases


async def test_an_open_request_keeps_its_hold_past_the_lease(world: World) -> None:
    world.limiter.service = world.new_limiter(lease_s=0.4)
    await world.limiter.service.follow()
    world.limiter.service.start()
    world.leases.start()
    world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    await asyncio.sleep(0.6)
    assert world.open_requests == 1
    # A gateway that dies renews nothing, and its holds go.
    await world.leases.stop()
    await until(lambda: world.open_requests == 0)
    call.hang_up()
    await call.done()


async def test_a_restarted_limiter_learns_of_open_holds_before_it_admits(world: World) -> None:
    world.leases.start()
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate])
    call = Call(world, stream=True)
    await call.until('"a"')
    held = world.held
    world.limiter.service = world.new_limiter(recovery_s=0.2)
    await world.limiter.service.follow()
    await until(lambda: world.open_requests == 1)
    assert world.held == held
    next_one = Call(world)
    await until(lambda: world.open_requests == 2)
    call.hang_up()
    gate.set()
    await call.done()
    await next_one.done()
    await until(lambda: world.is_idle)


async def test_while_the_limiter_recovers_requests_wait_and_then_run(world: World) -> None:
    world.limiter.service = world.new_limiter(recovery_s=0.1)
    await world.limiter.service.follow()
    call = await Call(world).done()
    assert call.status == 200


async def test_a_limiter_that_is_away_too_long_is_503(world: World) -> None:
    world.leases.admit_timeout_s = 0.05
    world.limiter.wire.down()
    call = await Call(world).done()
    assert call.status == 503
    world.limiter.wire.up()
    await until(lambda: world.is_idle)


async def test_a_release_that_does_not_get_through_is_repeated(world: World) -> None:
    world.limiter.wire.fail.add("Release")
    assert (await Call(world).done()).status == 200
    assert world.open_requests == 1
    world.limiter.wire.up()
    await until(lambda: world.is_idle)
    assert world.spent == price(10, 2)


# Keys


async def test_a_key_is_looked_up_once(world: World) -> None:
    looked_up: list[str] = []
    call = world.accounting.call

    async def counting(operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "find_key":
            looked_up.append(arguments["digest"])
        return await call(operation, arguments)

    world.accounting.call = counting  # type: ignore[method-assign]
    service = world.limiter.service
    await asyncio.gather(*(service.ask([Identify(digest(world.key))]) for _ in range(3)))
    answers = await service.ask([Identify(digest(world.key)), admit(world, world.key)])
    assert isinstance(answers[0], Identity)
    assert isinstance(answers[1], Grant)
    assert looked_up == [digest(world.key)]


async def test_a_key_that_nobody_knows_is_401(world: World) -> None:
    [answer] = await world.limiter.service.ask([Identify(digest(keys.new_key()))])
    assert isinstance(answer, Refusal)
    assert answer.status == 401


async def test_a_junk_key_holds_up_nobody_while_the_ledger_is_away(world: World) -> None:
    service = world.limiter.service
    await service.ask([Identify(digest(world.key))])
    service._lookup_wait_s = 0.05
    for breaks in ("fail", "hold"):
        if breaks == "fail":
            world.accounting.wire_call.down()
        else:
            world.accounting.wire_call.up()
            world.accounting.wire_call.hold["*"] = asyncio.Event()
        async with asyncio.timeout(30):
            junk, good = await service.ask([Identify(digest(keys.new_key())), admit(world, world.key)])
        assert isinstance(junk, Recovering)
        assert isinstance(good, Grant)


async def test_what_comes_in_one_list_takes_effect_in_its_order(world: World) -> None:
    service = world.limiter.service
    await service.ask([admit(world, world.key), Release("r", 0, 0, refused=True)])  # the key is not known yet
    assert service.admission.open_requests(world.account_id) == 0


async def test_before_the_ledger_is_followed_no_key_is_looked_up(world: World) -> None:
    service = world.new_limiter()
    [answer] = await service.ask([Identify(digest(world.key))])
    assert isinstance(answer, Recovering)
    await service.follow()
    assert isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity)


async def test_a_valid_key_is_never_401_because_a_settlement_overtook_its_look_up(world: World) -> None:
    service = world.limiter.service
    gate = world.accounting.wire_call.hold["find_key"] = asyncio.Event()
    version = world.ledger.get_account(world.account_id).version
    asked = asyncio.create_task(service.ask([Identify(digest(world.key))]))
    await world.accounting.wire_call.seen("find_key").wait()
    await service.ask([Release("x", 1, 1, balance=5, version=version + 1, account_id=world.account_id)])
    gate.set()
    [answer] = await asked
    assert isinstance(answer, Recovering)


async def test_a_revoked_key_and_a_suspended_account_are_refused_after_the_feed(world: World) -> None:
    service = world.limiter.service
    await service.ask([Identify(digest(world.key))])
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.set_active(world.account_id, False)
    await service.follow()
    assert (await service.ask([admit(world, world.key)]))[0].status == 401
    world.ledger.set_active(world.account_id, True)
    await service.follow()
    assert isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity)
    world.ledger.revoke_key(key.key_id)
    await service.follow()
    assert (await service.ask([Identify(digest(world.key))]))[0].status == 401


async def test_the_feed_goes_on_after_the_ledger_was_away(world: World) -> None:
    service = world.limiter.service
    await service.ask([Identify(digest(world.key))])
    world.accounting.wire_call.down()
    service.start()
    await asyncio.sleep(0.05)
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.revoke_key(key.key_id)
    world.accounting.wire_call.up()
    async with asyncio.timeout(5):
        while isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity):
            await asyncio.sleep(0.01)
    assert service.is_alive


async def test_an_ask_that_fails_does_not_fail_the_others(world: World) -> None:
    answers = await world.limiter.service.ask([object(), Identify(digest(world.key)), Status((world.account_id,))])
    assert answers[0].status == 503
    assert isinstance(answers[1], Identity)
    assert answers[2][0].account_id == world.account_id
