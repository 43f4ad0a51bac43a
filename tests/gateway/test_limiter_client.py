"""Holds that live as long as their requests, through restarts of the limiter; keys that follow the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command, FindKeys, PostHolds
from serve_app.contracts.generation import Delta, Rejected, Rejection, Started
from serve_app.contracts.limiting import (
    Adjust,
    Admit,
    Grant,
    Identify,
    Identity,
    OpenHold,
    Recovering,
    Refusal,
    Release,
    Renew,
    Renewed,
    Status,
)
from serve_app.gateway import limiter_client
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.limiter import limiter_service
from serve_app.limiter.limiter_service import STUCK_S, LimiterService
from tests.gateway.connections import Call
from tests.gateway.world import PATIENT_S, World, price, says, settled, until

RECOVERY_S = 0.05


def digest(key: str) -> str:
    return keys.digest(key)


async def call_across_a_restart(world: World) -> Call:
    """Returns a request whose prompt was counted when the limiter was lost. The next limiter knows its hold alone."""
    world.limiter.wire.fail.add("Adjust")
    call = Call(world, max_tokens=48)
    await world.limiter.wire.seen("Adjust").wait()
    world.limiter.service = world.new_limiter()
    await world.limiter.service.follow()
    world.limiter_client.start()
    await until(lambda: world.open_requests == 1)
    return call


def admit(world: World, key: str, request_id: str = "r") -> Admit:
    return Admit(request_id, "g", digest(key), "svc-chat", 10, 10, 1000, 3000)


# Leases


async def test_an_open_request_keeps_its_hold_past_the_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_service, "UNREAD_S", 0.0)  # nothing is spared after a jump of the clock
    limiter = world.limiter.service = world.new_limiter(lease_s=60)
    await limiter.follow()
    limiter.start()
    world.limiter_client.start()
    world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    call = Call(world, stream=True)
    await call.until('"a"')
    for _ in range(3):
        world.passed_s += 40
        asked = len(world.limiter.asked)
        await until(lambda asked=asked: any(isinstance(ask, Renew) for ask in world.limiter.asked[asked:]))  # type: ignore[misc]
    assert limiter.admission.expire() == []
    assert world.open_requests == 1
    # A gateway that dies renews nothing, and its holds go.
    await world.limiter_client.stop()
    world.passed_s += 61
    await until(lambda: world.open_requests == 0)
    call.hang_up()
    await call.done()


async def test_a_restarted_limiter_learns_of_open_holds_before_it_admits(world: World) -> None:
    world.limiter_client.start()
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), Delta("a", 1), gate])
    call = Call(world, stream=True)
    await call.until('"a"')
    held = world.held
    world.limiter.service = world.new_limiter(recovery_s=RECOVERY_S)
    await world.limiter.service.follow()
    next_one = Call(world)
    await until(lambda: world.open_requests == 1)
    assert world.held == held
    world.passed_s += RECOVERY_S
    await until(lambda: world.open_requests == 2)
    call.hang_up()
    gate.set()
    await call.done()
    await next_one.done()
    await until(lambda: world.is_idle)


@pytest.mark.parametrize("ledger_is_away", [False, True])
async def test_a_limiter_that_restarts_while_a_prompt_is_counted_reads_the_account_before_it_decides(
    world: World, ledger_is_away: bool
) -> None:
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=500)], says("x", prompt=500))
    call = await call_across_a_restart(world)
    if ledger_is_away:
        world.accounting.wire_call.down("FindKeys")
    world.limiter.wire.up()
    if ledger_is_away:
        await until(lambda: sum(isinstance(ask, Adjust) for ask in world.limiter.asked) > 1)
        assert len(world.backends.calls) == 1
        world.accounting.wire_call.up()
    assert (await call.done()).status == 200
    assert [one.sampling.max_tokens for one in world.backends.calls] == [48, 48]
    await settled(world, requests=1, spent=price(500, 1))


async def test_a_request_whose_key_the_ledger_no_longer_knows_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore of an older ledger."""
    world.backends.play([Rejected(Rejection.CREDIT, prompt_tokens=500)], says("x", prompt=500))
    call = await call_across_a_restart(world)

    async def finds_nothing(digests: list[str]) -> list[bool]:
        return [False for _ in digests]

    monkeypatch.setattr(world.limiter.service._queries, "_send", finds_nothing)
    world.limiter.wire.up()
    assert (await call.done()).status == 503
    await until(lambda: world.is_idle)


async def test_while_the_limiter_recovers_requests_wait_and_then_run(world: World) -> None:
    world.limiter.service = world.new_limiter(recovery_s=RECOVERY_S)
    await world.limiter.service.follow()
    call = Call(world)
    await until(lambda: sum(isinstance(ask, Admit) for ask in world.limiter.asked) > 1)
    assert world.open_requests == 0
    world.passed_s += RECOVERY_S
    assert (await call.done()).status == 200


async def test_a_limiter_that_is_away_too_long_is_503(world: World) -> None:
    world.limiter_client.admit_timeout_s = 0.05
    world.limiter.wire.down()
    call = await Call(world).done()
    assert call.status == 503
    world.limiter.wire.up()
    await until(lambda: world.is_idle)


async def test_a_release_that_fails_is_repeated(world: World) -> None:
    world.limiter.wire.fail.add("Release")
    assert (await Call(world).done()).status == 200
    assert world.open_requests == 1
    world.limiter.wire.up()
    await until(lambda: world.is_idle)
    assert world.spent == price(10, 2)


# Keys


async def test_a_key_is_looked_up_once(world: World) -> None:
    looked_up: list[str] = []
    call = world.accounting.run

    async def counting(command: Command[Any]) -> Any:
        if isinstance(command, FindKeys):
            looked_up.extend(command.digests)
        return await call(command)

    world.accounting.run = counting  # type: ignore[method-assign]
    service = world.limiter.service
    await asyncio.gather(*(service.ask([Identify(digest(world.key))]) for _ in range(3)))
    answers = await service.ask([Identify(digest(world.key)), admit(world, world.key)])
    assert isinstance(answers[0], Identity)
    assert isinstance(answers[1], Grant)
    assert looked_up == [digest(world.key)]


async def test_an_unknown_key_is_401(world: World) -> None:
    [answer] = await world.limiter.service.ask([Identify(digest(keys.new_key()))])
    assert isinstance(answer, Refusal)
    assert answer.status == 401


async def test_a_junk_key_delays_no_other_request_while_the_ledger_is_away(world: World) -> None:
    service = world.limiter.service
    await service.ask([Identify(digest(world.key))])
    service._lookup_wait_s = 0.05
    for breaks in ("fail", "hold"):
        if breaks == "fail":
            world.accounting.wire_call.down()
        else:
            world.accounting.wire_call.up()
            world.accounting.wire_call.hold["*"] = asyncio.Event()
        async with asyncio.timeout(60):
            junk, good = await service.ask([Identify(digest(keys.new_key())), admit(world, world.key)])
        assert isinstance(junk, Recovering)
        assert isinstance(good, Grant)


async def test_commands_of_one_list_take_effect_in_order(world: World) -> None:
    service = world.limiter.service
    await service.ask([admit(world, world.key), Release("r", 0, 0, refused=True)])  # the key is not known yet
    assert service.admission.status(world.account_id).open_requests == 0


async def test_before_the_ledger_is_followed_no_key_is_looked_up(world: World) -> None:
    service = world.new_limiter()
    [answer] = await service.ask([Identify(digest(world.key))])
    assert isinstance(answer, Recovering)
    await service.follow()
    assert isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity)


async def test_a_valid_key_is_never_401_because_a_settlement_overtook_its_look_up(world: World) -> None:
    service = world.limiter.service
    gate = world.accounting.wire_call.hold["FindKeys"] = asyncio.Event()
    version = world.ledger.get_account(world.account_id).version
    asked = asyncio.create_task(service.ask([Identify(digest(world.key))]))
    await world.accounting.wire_call.seen("FindKeys").wait()
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
    asked = world.accounting.called.count("ReadChanges")
    service.start()
    await until(lambda: world.accounting.called.count("ReadChanges") > asked + 1)
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.revoke_key(key.key_id)
    world.accounting.wire_call.up()
    async with asyncio.timeout(60):
        while isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity):
            await asyncio.sleep(0.01)
    assert service.is_alive


async def test_a_feed_that_hangs_admits_no_key_for_longer_than_the_limit_of_staleness(world: World) -> None:
    service = LimiterService(
        world.limiter.service.admission, world.accounting, lookup_wait_s=PATIENT_S, staleness_s=5.0, clock=world.clock
    )
    await service.follow()
    assert isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity)
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.revoke_key(key.key_id)
    hung = world.accounting.wire_call.hold["ReadChanges"] = asyncio.Event()
    following = asyncio.create_task(service.follow())
    await world.accounting.wire_call.seen("ReadChanges").wait()
    world.passed_s += 4.0
    assert isinstance((await service.ask([admit(world, world.key, "early")]))[0], Grant), "within the limit"
    world.passed_s += 1.5
    for answer in await service.ask([admit(world, world.key, "late"), Identify(digest(world.key))]):
        assert isinstance(answer, Refusal)
        assert (answer.status, answer.code) == (503, "overloaded")
        assert answer.retry_after_s is not None
    hung.set()
    await following
    await service.follow()
    assert (await service.ask([admit(world, world.key, "then")]))[0].status == 401


async def test_a_limiter_confirms_keys_while_one_accounting_process_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        async def run(self, command: Any) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(limiter_service, "FEED_TIMEOUT_S", 0.05)
    books = AccountingShards([Gone(), world.accounting])  # type: ignore[list-item]
    service = LimiterService(
        world.limiter.service.admission, books, lookup_wait_s=PATIENT_S, staleness_s=5.0, clock=world.clock
    )
    with pytest.raises(TimeoutError):
        await service.follow()
    monkeypatch.setattr(limiter_service, "FEED_TIMEOUT_S", PATIENT_S)
    await service.follow()
    assert service.stale_s < 5.0
    assert isinstance((await service.ask([Identify(digest(world.key))]))[0], Identity)


async def test_a_limiter_is_well_while_the_ledger_is_away_and_ill_when_a_task_stands_still(world: World) -> None:
    service = world.limiter.service
    world.accounting.wire_call.down()
    service.start()
    for _ in range(3):
        world.passed_s += 20.0
        await until(lambda: service.is_alive)  # it tries again and again
    world.accounting.wire_call.hold["ReadChanges"] = asyncio.Event()
    world.accounting.wire_call.seen("ReadChanges").clear()
    await world.accounting.wire_call.seen("ReadChanges").wait()
    world.passed_s += STUCK_S
    assert not service.is_alive, "the feed waits for an answer; tidy goes on"


async def test_a_command_that_fails_does_not_fail_the_others(world: World) -> None:
    answers = await world.limiter.service.ask([object(), Identify(digest(world.key)), Status((world.account_id,))])
    assert answers[0].status == 503
    assert isinstance(answers[1], Identity)
    assert answers[2][0].account_id == world.account_id


# Holds in the ledger


class Admitting:
    """A limiter that admits under an epoch that the test sets, and the ledger that gateways post their holds in."""

    def __init__(self) -> None:
        self.epoch: int | None = 1
        self.beats = 0
        self.posts: list[tuple[str, ...]] = []
        self.fails = False

    async def ask(self, asks: list[Any]) -> list[Any]:
        self.beats += 1
        return [Renewed((), self.epoch) for _ in asks]

    async def run(self, command: Any) -> Any:
        assert isinstance(command, PostHolds)
        self.posts.append(tuple(hold.request_id for hold in command.holds))
        if self.fails:
            raise Unavailable("the answer was lost")


@pytest.fixture
async def posting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Admitting, LimiterClient]]:
    """A gateway with the open request r1 beats fast."""
    monkeypatch.setattr(limiter_client, "HEARTBEAT_S", 0.005)
    there: Any = Admitting()
    client = LimiterClient([there], "g", there, admit_timeout_s=PATIENT_S)
    client.adopt([OpenHold("r1", "acct", "key", 10, 10, 1, 1, 10)])
    client.start()
    await until(lambda: there.posts)
    yield there, client
    await client.stop()


async def test_what_a_limiter_has_posted_for_a_gateway_goes_when_the_next_one_admits(
    posting: tuple[Admitting, LimiterClient],
) -> None:
    limiter, _ = posting
    # Nothing of this gateway was posted, as far as it knows: a limiter may have posted in its name.
    assert limiter.posts == [()]
    limiter.epoch = 2
    await until(lambda: len(limiter.posts) == 2)
    beats = limiter.beats
    await until(lambda: limiter.beats > beats + 5)
    assert limiter.posts == [(), ()]


async def test_a_post_whose_answer_was_lost_is_made_again(posting: tuple[Admitting, LimiterClient]) -> None:
    limiter, _ = posting
    limiter.fails, limiter.epoch = True, None
    await until(lambda: ("r1",) in limiter.posts)
    limiter.epoch, limiter.fails = 1, False
    await until(lambda: limiter.posts[-1] == ())
