"""The limiter knows the ledger's state of active accounts, and nothing of others."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.books import AccountSnapshot, KeySnapshot, Outcome, Settlement
from serve_app.contracts.commands import Command, FindKeys
from serve_app.contracts.limiting import (
    Admit,
    Grant,
    Identify,
    Identity,
    Recovering,
    Refusal,
    Release,
)
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price
from serve_app.limiter import limiter_service as limiter
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from tests.gateway.world import PATIENT_S, World, until

TERMS: dict[str, Any] = {
    "models": ("svc-chat",), "rpm": 7, "tpm": 7000, "concurrency": 2, "budget": 50_000, "budget_period": "day",
}  # fmt: skip


def digest(key: str) -> str:
    return keys.digest(key)


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


def known_key(world: World, key: str) -> KeySnapshot:
    state = world.limiter.service.admission._keys[digest(key)].snapshot
    assert state is not None
    return state


def known_account(world: World) -> AccountSnapshot:
    own = world.limiter.service.admission._accounts[world.account_id].snapshot
    assert own is not None
    return own


# What the limiter knows


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
    terms = {name: state.limits.get(name) or getattr(state, name) for name in TERMS}
    assert terms == TERMS
    assert (state.key_id, state.spent, state.expires_at) == (key_id, 3000, expires_at)
    account = world.ledger.get_account(world.account_id)
    assert state.spent_version == account.version
    assert (known_account(world).expiring, known_account(world).limits) == (account.expiring, account.limits)


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
    world.ledger.update_key(key_id, expires_at=time.time() + 1000.0)
    await world.limiter.service.follow()
    assert isinstance(await ask(world, Identify(digest(key))), Identity)
    world.later_s = 1001.0
    assert (await ask(world, Identify(digest(key)))).status == 401


async def test_a_settlement_that_only_the_ledger_reports_counts_for_the_keys_budget(world: World) -> None:
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


# What the limiter does not keep


async def test_changes_of_accounts_without_requests_are_not_kept(world: World) -> None:
    service = world.limiter.service
    await ask(world, Identify(digest(world.key)))
    for _ in range(3):
        world.new_account()
    await service.follow()
    assert (len(service.admission._accounts), len(service.admission._keys)) == (1, 1)
    # No state is missing later: the first request looks the account up.
    account_id, key = world.new_account()
    await service.follow()
    world.ledger.set_active(account_id, False)
    assert (await ask(world, admit(key))).status == 401


async def test_a_revocation_that_overtakes_the_look_up_is_not_lost(world: World) -> None:
    service = world.limiter.service
    [key] = world.ledger.list_keys(world.account_id)
    read, gate = asyncio.Event(), asyncio.Event()
    call = world.accounting.run

    async def late(command: Command[Any]) -> Any:
        answer = await call(command)
        if isinstance(command, FindKeys):
            read.set()
            await gate.wait()
        return answer

    world.accounting.run = late  # type: ignore[method-assign]
    asked = asyncio.create_task(service.ask([Identify(digest(world.key))]))
    await read.wait()
    world.ledger.revoke_key(key.key_id)
    await service.follow()
    gate.set()
    [answer] = await asked
    assert isinstance(answer, Refusal)
    assert answer.status == 401


async def test_unknown_keys_leave_no_state_behind(world: World) -> None:
    service = world.limiter.service
    for _ in range(2):
        answers = await service.ask([Identify(digest(keys.new_key())) for _ in range(40)])
        assert {answer.status for answer in answers} == {401}
    await asyncio.sleep(0)
    assert (len(service.admission._accounts), len(service.admission._keys), len(service._lookups)) == (0, 0, 0)


async def test_look_ups_at_once_are_bounded_and_the_others_are_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MAX_LOOKUPS", 10)
    service = world.limiter.service
    service._lookup_wait_s = 0.01
    gate = world.accounting.wire_call.hold["FindKeys"] = asyncio.Event()
    answers = await service.ask([Identify(digest(keys.new_key())) for _ in range(30)])
    assert all(isinstance(answer, Recovering) for answer in answers)
    assert len(service._lookups) == 10
    gate.set()
    service._lookup_wait_s = PATIENT_S
    await until(lambda: not service._lookups)
    assert isinstance(await ask(world, Identify(digest(world.key))), Identity)


async def test_idle_accounts_are_forgotten_round_by_round_and_looked_up_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MAX_FORGOTTEN", 3)
    now = 1000.0
    admission = Admission(lambda: now, random.Random(7), Contract(1000, 10**6, 8), recovery_s=0.0)
    service = LimiterService(admission, world.accounting)
    await service.follow()
    for key in [world.key, *(world.new_account()[1] for _ in range(4))]:
        assert isinstance((await service.ask([Identify(digest(key))]))[0], Identity)
    now += limiter.IDLE_S - 1
    service.tidy()
    assert len(admission._keys) == 5
    now += 1
    service.tidy()
    assert len(admission._keys) == 2
    service.tidy()
    assert (len(admission._keys), len(admission._accounts)) == (0, 5)
    assert isinstance((await service.ask([admit(world.key)]))[0], Grant)
    now += limiter.IDLE_S
    for _ in range(3):
        service.tidy()
    assert len(admission._accounts) == 1
    assert admission.status(world.account_id).open_requests == 0, "its lease is over, too"
