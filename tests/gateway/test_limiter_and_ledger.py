"""The limiter knows what the ledger says of who asks, and nothing of who does not."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from serve_app.gateway import limiter
from serve_app.gateway.limiter import LimiterService
from serve_app.ledger import keys
from serve_app.ledger.messages import Outcome, Price, Settlement
from serve_app.limits import AccountState, Admission, Contract, KeyState
from serve_app.limits.messages import Admit, Grant, Identify, Identity, Recovering, Refusal, Release
from tests.gateway.world import SECRET, World, until

TERMS: dict[str, Any] = {
    "models": ("svc-chat",), "rpm": 7, "tpm": 7000, "concurrency": 2, "budget": 50_000, "budget_period": "day",
}  # fmt: skip


def digest(key: str) -> str:
    return keys.digest(key, SECRET)


def add_key(world: World, **terms: Any) -> tuple[str, str]:
    """Another key of the account: its id and itself."""
    key = keys.new_key()
    snapshot = world.ledger.create_key(world.account_id, "other", digest(key), keys.hint(key), **terms)
    return snapshot.key_id, key


def admit(key: str, request_id: str = "r", model: str = "svc-chat", prompt: int = 10, output: int = 10) -> Admit:
    return Admit(request_id, "g", digest(key), model, prompt, output, 1000, 3000)


def settlement(world: World, key_id: str, request_id: str, tokens: int) -> Settlement:
    now = time.time()
    counts = tokens, 0, 0
    return Settlement(
        request_id, world.account_id, key_id, "svc-chat", "fake", Price(1000, 500, 3000), *counts, Outcome.COMPLETED,
        now - 1, now,
    )  # fmt: skip


async def ask(world: World, what: Any) -> Any:
    return (await world.limiter.service.ask([what]))[0]


def known_key(world: World, key: str) -> KeyState:
    state = world.limiter.service.admission._keys[digest(key)].state
    assert state is not None
    return state


def known_account(world: World) -> AccountState:
    own = world.limiter.service.admission._accounts[world.account_id].own
    assert own is not None
    return own


# What it knows


async def test_a_look_up_brings_all_the_terms_of_key_and_account(world: World) -> None:
    expires_at = time.time() + 1000.0
    key_id, key = add_key(world, **TERMS, expires_at=expires_at)
    world.ledger.set_limits(world.account_id, weight=40)
    world.ledger.credit(world.account_id, 500, kind="grant", expires_at=expires_at)
    world.ledger.settle([settlement(world, key_id, "before", 3)])
    grant = await ask(world, admit(key))
    assert isinstance(grant, Grant)
    assert (grant.weight, grant.requests.limit, grant.tokens.limit) == (40, 7, 7000)
    state = known_key(world, key)
    assert {name: getattr(state, name) for name in TERMS} == TERMS
    assert (state.key_id, state.spent, state.expires_at) == (key_id, 3000, expires_at)
    account = world.ledger.get_account(world.account_id)
    assert state.spent_version == account.version
    assert (known_account(world).expiring, known_account(world).weight) == (account.expiring, 40)


async def test_changed_terms_reach_the_limiter_with_the_feed(world: World) -> None:
    key_id, key = add_key(world)
    assert isinstance(await ask(world, Identify(digest(key))), Identity)
    world.ledger.update_key(key_id, models=("svc-coder",))
    await world.limiter.service.follow()
    refusal = await ask(world, admit(key))
    assert (refusal.status, refusal.code) == (422, "model_not_found")
    world.ledger.update_key(key_id, models=None, budget=1000, budget_period="month")
    await world.limiter.service.follow()
    assert (await ask(world, admit(key, prompt=0))).hold == 1000
    world.ledger.update_key(key_id, expires_at=time.time() + 0.05)
    await world.limiter.service.follow()
    async with asyncio.timeout(30):
        while isinstance(answer := await ask(world, Identify(digest(key))), Identity):
            await asyncio.sleep(0.005)
    assert answer.status == 401


async def test_a_settlement_that_only_the_ledger_tells_of_counts_for_the_keys_budget(world: World) -> None:
    """The gateway died; a replica has settled for it."""
    key_id, key = add_key(world, **TERMS)
    await ask(world, Identify(digest(key)))
    world.ledger.settle([settlement(world, key_id, "orphan", 48)])
    await world.limiter.service.follow()
    assert (await ask(world, admit(key, prompt=0))).hold == 2000
    assert (await ask(world, admit(key, "next"))).code == "budget_exceeded"


async def test_the_rest_of_a_grant_is_known_again_after_each_settlement(world: World) -> None:
    expires_at = time.time() + 1000.0
    world.ledger.credit(world.account_id, 10_000, kind="grant", expires_at=expires_at)
    [key_snapshot] = world.ledger.list_keys(world.account_id)
    await ask(world, admit(world.key))
    [settled] = world.ledger.settle([settlement(world, key_snapshot.key_id, "r", 4)])
    assert known_account(world).expiring == ((expires_at, 10_000),)
    await ask(world, Release("r", 4, 0, settled.balance, settled.version))
    await world.limiter.service.follow()
    assert known_account(world).expiring == ((expires_at, 6_000),)
    assert known_account(world).version == settled.version


# What it does not keep


async def test_changes_of_accounts_that_nobody_has_asked_about_are_not_kept(world: World) -> None:
    service = world.limiter.service
    await ask(world, Identify(digest(world.key)))
    for _ in range(20):
        world.new_account()
    await service.follow()
    stats = service.admission.stats()
    assert (stats.accounts, stats.keys) == (1, 1)
    # Nor is anything lost by it: who comes is looked up.
    account_id, key = world.new_account()
    await service.follow()
    world.ledger.set_active(account_id, False)
    assert (await ask(world, admit(key))).status == 401


async def test_a_revocation_that_overtakes_the_look_up_is_not_lost(world: World) -> None:
    service = world.limiter.service
    [key] = world.ledger.list_keys(world.account_id)
    read, gate = asyncio.Event(), asyncio.Event()
    call = world.accounting.call

    async def late(operation: str, arguments: dict[str, Any]) -> Any:
        answer = await call(operation, arguments)
        if operation == "find_key":
            read.set()
            await gate.wait()
        return answer

    world.accounting.call = late  # type: ignore[method-assign]
    asked = asyncio.create_task(service.ask([Identify(digest(world.key))]))
    await read.wait()
    world.ledger.revoke_key(key.key_id)
    await service.follow()
    gate.set()
    [answer] = await asked
    assert isinstance(answer, Refusal)
    assert answer.status == 401


async def test_keys_that_nobody_knows_leave_nothing_behind(world: World) -> None:
    service = world.limiter.service
    for _ in range(5):
        answers = await service.ask([Identify(digest(keys.new_key())) for _ in range(40)])
        assert {answer.status for answer in answers} == {401}
    await asyncio.sleep(0)
    stats = service.admission.stats()
    assert (stats.accounts, stats.keys, len(service._lookups)) == (0, 0, 0)


async def test_only_so_many_look_ups_are_under_way_and_the_others_are_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MOST_LOOKUPS", 10)
    service = world.limiter.service
    service._lookup_wait_s = 0.01
    gate = world.accounting.wire_call.hold["find_key"] = asyncio.Event()
    answers = await service.ask([Identify(digest(keys.new_key())) for _ in range(30)])
    assert all(isinstance(answer, Recovering) for answer in answers)
    assert len(service._lookups) == 10
    gate.set()
    service._lookup_wait_s = 30
    await until(lambda: not service._lookups)
    assert isinstance(await ask(world, Identify(digest(world.key))), Identity)


async def test_who_is_idle_is_forgotten_round_by_round_and_looked_up_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MOST_FORGOTTEN", 3)
    now = 1000.0
    admission = Admission(lambda: now, random.Random(7), Contract(1000, 10**6, 8), recovery_s=0.0)
    service = LimiterService(admission, world.accounting)
    await service.follow()
    for key in [world.key, *(world.new_account()[1] for _ in range(4))]:
        assert isinstance((await service.ask([Identify(digest(key))]))[0], Identity)
    now += limiter.IDLE_S - 1
    service.tidy()
    assert admission.stats().keys == 5
    now += 1
    service.tidy()
    assert admission.stats().keys == 2
    service.tidy()
    assert (admission.stats().keys, admission.stats().accounts) == (0, 5)
    assert isinstance((await service.ask([admit(world.key)]))[0], Grant)
    now += limiter.IDLE_S
    for _ in range(3):
        service.tidy()
    assert admission.stats().accounts == 1
    assert admission.open_requests(world.account_id) == 0, "its lease is over, too"
