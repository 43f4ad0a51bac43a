"""An account belongs to one limiter and one accounting process, for any number of processes and after restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts import accounting_shards
from serve_app.contracts import key_format as keys
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.calls import Unavailable, shard_name, shard_of
from serve_app.contracts.commands import FindUnsettled, GetAccount
from serve_app.contracts.generation import Delta, Started
from serve_app.contracts.limiting import Admit, Announce, Identify, Identity, Release, Status
from tests.gateway.connections import Call
from tests.gateway.world import World, says, until

SHARDS = 3


@pytest.fixture
async def shards(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path, tmp_path / "ledger.db", limiter_shards=SHARDS, accounting_shards=2)
    await world.start()
    yield world
    await world.stop()


def asks_of(world: World, kind: type) -> list[int]:
    """Returns the number of commands of a kind that each limiter has received."""
    return [sum(isinstance(ask, kind) for ask in limiter.asked) for limiter in world.limiters]


def home_of(world: World) -> int:
    return shard_of(world.account_id, SHARDS)


def test_an_accounts_shard_is_the_same_in_every_release() -> None:
    # With other numbers, a gateway of the next release would call another limiter while this one has open holds.
    accounts = ("acct_a", "acct_b", "acct_c", "")
    assert [shard_of(account, 3) for account in accounts] == [2, 2, 0, 0]
    assert [shard_name("Limiter", index) for index in range(3)] == ["Limiter", "Limiter-1", "Limiter-2"]


def test_accounts_are_spread_evenly() -> None:
    counts = Counter(shard_of(f"acct_{number:x}", 7) for number in range(7000))
    assert set(counts) == set(range(7))
    assert max(counts.values()) < 1.15 * min(counts.values())


async def test_a_request_calls_only_its_accounts_limiter_and_leaves_no_hold(shards: World) -> None:
    shards.backends.play(says("a", "b"))
    assert (await Call(shards).done()).status == 200
    await until(lambda: shards.is_idle)
    expected = [0] * SHARDS
    expected[home_of(shards)] = 1
    assert asks_of(shards, Release) == expected
    assert [count > 0 for count in asks_of(shards, Admit)] == [count > 0 for count in expected]
    assert shards.recorded == 1
    assert shards.books_balance()


async def test_settlements_of_an_account_go_through_one_accounting_process(shards: World) -> None:
    for _ in range(3):
        shards.backends.play(says("a"))
        await Call(shards).done()
    await until(lambda: shards.is_idle)
    counts = [len(accounting.settled) for accounting in shards.accountings]
    assert counts[shard_of(shards.account_id, 2)] == 3
    assert sum(counts) == 3


async def test_a_keys_account_is_looked_up_once_by_the_gateway_and_once_by_its_limiter(shards: World) -> None:
    for _ in range(4):
        shards.backends.play(says("a"))
        await Call(shards).done()
    looked_up = sum(accounting.called.count("FindKeys") for accounting in shards.accountings)
    assert looked_up == 2


async def test_an_unknown_key_is_sent_to_no_limiter(shards: World) -> None:
    before = [len(limiter.asked) for limiter in shards.limiters]
    assert (await Call(shards, key=keys.new_key()).done()).status == 401
    assert [len(limiter.asked) for limiter in shards.limiters] == before


@pytest.mark.parametrize("index", range(SHARDS))
async def test_a_limiter_that_restarts_learns_its_own_accounts_holds_and_no_others(shards: World, index: int) -> None:
    shards.limiter_client.start()
    gate = asyncio.Event()
    shards.backends.play([Started(10, 0), Delta("a", 1), gate])
    call = Call(shards, stream=True)
    await call.until('"a"')
    held = shards.held
    assert held > 0
    restarted = shards.limiters[index]
    restarted.service = shards.new_limiter(recovery_s=0.05)
    await restarted.service.follow()
    mine = index == home_of(shards)
    if mine:
        await until(lambda: shards.open_requests == 1)
        assert asks_of(shards, Announce)[index] >= 1
    assert shards.held == held
    shards.passed_s += 0.05
    call.hang_up()
    gate.set()
    await call.done()
    await until(lambda: shards.is_idle)


async def test_accounts_of_all_shards_are_shown_in_their_order(shards: World) -> None:
    accounts: list[str] = []
    while {shard_of(account, SHARDS) for account in accounts} != set(range(SHARDS)) or len(accounts) < 12:
        accounts.append(shards.new_account()[0])  # their ids are random
    states = await shards.limiter_client.ask(Status(tuple(accounts)))
    assert [state.account_id for state in states] == accounts


async def test_while_one_limiter_is_away_accounts_of_the_others_are_served(shards: World) -> None:
    found: dict[bool, str] = {}
    while len(found) < 2:
        account, key = shards.new_account()
        found.setdefault(shard_of(account, SHARDS) == 0, key)
    shards.backends.play(says("a"))
    assert (await Call(shards, key=found[True]).done()).status == 200
    shards.limiters[0].wire.down()
    assert (await Call(shards, key=found[False]).done()).status == 200
    shards.limiter_client.admit_timeout_s = 0.05
    assert (await Call(shards, key=found[True]).done()).status == 503
    shards.limiters[0].wire.up()


async def test_a_client_that_hangs_up_while_it_is_admitted_leaves_no_hold(shards: World) -> None:
    gate = asyncio.Event()
    home = shards.limiters[home_of(shards)]
    # The key is known already, so that the next request waits at its limiter.
    shards.backends.play(says("a"))
    await Call(shards).done()
    await until(lambda: shards.is_idle)
    home.wire.hold["Admit"] = gate
    seen = home.wire.seen("Admit")
    seen.clear()
    call = Call(shards, stream=True)
    await seen.wait()
    call.hang_up()
    await call.done()
    gate.set()
    await until(lambda: shards.is_idle)
    assert shards.recorded == 1


async def test_many_at_once_never_spend_more_than_there_is(shards: World) -> None:
    spendable = 10 * (10 * 1000 + 2 * 3000)
    account, key = shards.new_account(credit=spendable, concurrency=500, rpm=10_000)
    shards.backends.play(says("a", "b"))
    calls = [Call(shards, key=key, max_tokens=2) for _ in range(30)]
    statuses = Counter([(await call.done()).status for call in calls])
    assert set(statuses) <= {200, 402}
    balance = shards.ledger.get_account(account).balance
    assert balance >= 0
    assert shards.ledger.account_totals(account).charged + balance == spendable
    assert shards.books_balance()


async def test_identifying_a_caller_asks_the_accounts_limiter(shards: World) -> None:
    answer = await shards.limiter_client.ask(Identify(keys.digest(shards.key)))
    assert isinstance(answer, Identity)
    assert answer.account_id == shards.account_id
    assert sum(asks_of(shards, Identify)) == asks_of(shards, Identify)[home_of(shards)] == 1


class Shard:
    """An accounting process that answers with its number, or is away."""

    def __init__(self, number: int, *, away: bool) -> None:
        self.number = number
        self.away = away

    async def run(self, command: Any) -> Any:
        if self.away:
            raise Unavailable("no replica")
        return self.number

    async def settle(self, batch: list[Any]) -> Any:
        if self.away:
            await asyncio.Event().wait()  # Serve waits without a bound for a process that is gone
        return [self.number for _ in batch]


async def test_a_process_that_does_not_answer_at_all_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting_shards, "SETTLE_TIMEOUT_S", 0.02)
    shards = [Shard(0, away=True), Shard(1, away=False)]
    books = AccountingShards(shards)
    batch: Any = ["r1", "r2"]
    assert await books.settle(batch) == [1, 1]
    # From then on it is not even asked.
    monkeypatch.setattr(accounting_shards, "SETTLE_TIMEOUT_S", 600)
    async with asyncio.timeout(60):
        assert await books.settle(batch) == [1, 1]
    assert await books.run(FindUnsettled(("r1",))) == 1
    shards[1].away, shards[0].away = True, False
    monkeypatch.setattr(accounting_shards, "SETTLE_TIMEOUT_S", 0.02)
    assert await books.settle(batch) == [0, 0]


class Silent(Shard):
    """One whose machine is gone: a command waits, too."""

    async def run(self, command: Any) -> Any:
        if self.away:
            await asyncio.Event().wait()
        return self.number


async def test_a_command_that_is_given_up_sends_the_next_ones_to_another_process() -> None:
    shards = [Silent(0, away=True), Silent(1, away=False)]
    books = AccountingShards(shards)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await books.run(FindUnsettled(("r1",)))
    async with asyncio.timeout(60):
        assert await books.run(FindUnsettled(("r1",))) == 1
        shards[0].away = False
        assert await books.run(FindUnsettled(("r1",))) == 1


@pytest.mark.parametrize("home", range(3))
async def test_a_command_goes_to_its_accounts_accounting_process_and_to_another_while_that_is_away(home: int) -> None:
    account = next(f"acct_{n}" for n in range(100) if shard_of(f"acct_{n}", 3) == home)
    all_there = AccountingShards([Shard(number, away=False) for number in range(3)])
    assert await all_there.run(GetAccount(account)) == home
    one_away = AccountingShards([Shard(number, away=number == home) for number in range(3)])
    assert await one_away.run(GetAccount(account)) != home
    with pytest.raises(Unavailable):
        await AccountingShards([Shard(number, away=True) for number in range(3)]).run(GetAccount(account))
