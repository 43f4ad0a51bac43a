"""One limiter at a time: two and three of them over one real ledger, with clocks, pauses and cuts of the test's own."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from serve_app.accounting.limiter_leases import LeaseWatch
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command, HoldLease, PostHolds
from serve_app.contracts.limiting import RECOVERY_S, Adjust, Admit, Grant, OpenHold, Recovering, Renew, Renewed
from serve_app.contracts.limits import Contract
from serve_app.limiter import tenure
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from serve_app.limiter.processes import has_ended, process_name
from serve_app.limiter.tenure import POLL_S, Tenure
from tests.accounting.books import Ledger
from tests.limiter.world import account_snapshot, key_snapshot

LASTS_S = 20.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only real time: a call that the test holds lasts as long as the machine takes."""
    monkeypatch.setattr(tenure, "CALL_S", 3600.0)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a ledger."""
    path = tmp_path_factory.mktemp("empty") / "ledger.db"
    Ledger(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def ledger(empty: Path, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{shutil.copy(empty, tmp_path / 'ledger.db')}") as ledger:
        yield ledger


@dataclass
class Time:
    now: float = 1000.0


class Books:
    """An accounting process: the ledger, and how long leases were seen unchanged. Its calls can be held and cut."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self.clock = clock
        self.watch = LeaseWatch(clock)
        self.is_cut = False
        self.holds_calls = False
        self.held: list[asyncio.Future[None]] = []

    async def run(self, command: Command[Any]) -> Any:
        await self._pass()
        if isinstance(command, HoldLease):
            command = self.watch.with_over(command)
        answer = self._ledger.run(command)
        if isinstance(command, HoldLease):
            self.watch.look(command, answer)
        await self._pass()
        return answer

    async def _pass(self) -> None:
        if self.holds_calls:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.held.append(gate)
            await gate
        if self.is_cut:
            raise Unavailable("cut")


@dataclass
class Limiter:
    """A limiter process with a clock of its own, and the accounting process of its service."""

    name: str
    ledger: Ledger
    time: Time
    dead: set[str]
    pace: float = 1.0
    shard: int = 0
    shards: int = 1
    books: Books | None = None
    recovery_s: float = RECOVERY_S
    next_at: float = 0.0
    is_paused: bool = False
    turning: asyncio.Task[float] | None = None
    service: LimiterService = field(init=False)
    tenure: Tenure = field(init=False)

    def __post_init__(self) -> None:
        offset = zlib.crc32(self.name.encode()) % 10_000

        def clock() -> float:
            return offset + self.time.now * self.pace

        if self.books is None:
            self.books = Books(self.ledger, clock)
        self.admission = Admission(clock, Random(7), Contract(), recovery_s=self.recovery_s)
        self.service = LimiterService(self.admission, self.books, shards=self.shards, clock=clock)
        self.tenure = self.service.tenure = Tenure(
            self.service, self.books, shard=self.shard, shards=self.shards, lasts_s=LASTS_S, clock=clock,
            process=self.name, ended=self.dead.__contains__,
        )  # fmt: skip

    @property
    def admits(self) -> bool:
        return self.admission.admits

    async def run_for(self, seconds: float, *others: Limiter) -> list[str]:
        """Turns of this one and of others as they are due. Returns who admitted, in the order of the changes."""
        seen: list[str] = []
        end = self.time.now + seconds
        everyone = (self, *others)
        while self.time.now < end:
            for one in everyone:
                if not one.is_paused and self.time.now >= one.next_at:
                    try:
                        one.next_at = self.time.now + await one.tenure.turn()
                    except Unavailable:
                        one.next_at = self.time.now + POLL_S
            admitting = [one.name for one in everyone if one.admits]
            assert len(admitting) <= 1
            if admitting and admitting != seen[-1:]:
                seen += admitting
            self.time.now += 0.1
        return seen

    def wants(self, count: int = 1, serial: list[int] = [0]) -> None:  # noqa: B006
        """So many clients ask it for the first time."""
        for _ in range(count):
            serial[0] += 1
            self.service._asked[f"asked-{serial[0]}"] = self.admission._clock()


@pytest.fixture
def limiter(ledger: Ledger) -> Callable[..., Limiter]:
    time, dead = Time(), set[str]()

    def make(name: str, **fields: Any) -> Limiter:
        return Limiter(name, ledger, time, dead, **fields)

    return make


# Takeover


async def test_the_first_limiter_begins_after_the_recovery_and_keeps_the_lease(
    limiter: Callable[..., Limiter],
) -> None:
    a, b = limiter("a"), limiter("b")
    assert await a.run_for(RECOVERY_S - 0.2, b) == []
    assert await a.run_for(60, b) == ["a"]
    assert (a.tenure.epoch, b.tenure.epoch) == (1, None)


async def test_a_silent_limiter_is_waited_for_and_does_not_admit_when_it_wakes(limiter: Callable[..., Limiter]) -> None:
    a, b = limiter("a"), limiter("b")
    await a.run_for(10, b)
    a.is_paused = True
    paused_at = a.time.now
    while not b.admits:
        await b.run_for(0.1, a)
        assert b.time.now - paused_at < 25, "the gap in admission"
    assert b.time.now - paused_at > LASTS_S - 3
    await b.run_for(60, a)
    assert not a.admits, "its clock went on while it stood still"
    a.is_paused = False
    assert await a.run_for(30, b) == ["b"]
    assert (a.admission.epoch, b.tenure.epoch) == (1, 2)


async def test_of_one_service_the_time_before_the_successors_start_counts(limiter: Callable[..., Limiter]) -> None:
    """Serve needs a while to notice that a limiter is silent; its accounting process has seen the last renewal."""
    a = limiter("a")
    await a.run_for(10)
    a.is_paused = True
    a.time.now += 15
    b = limiter("a2", books=a.books)
    assert await b.run_for(10, a) == ["a", "a2"], "together less than 25 s"


async def test_a_limiter_whose_process_has_ended_is_succeeded_at_once(limiter: Callable[..., Limiter]) -> None:
    a, b = limiter("a"), limiter("b")
    await a.run_for(10, b)
    a.is_paused = True
    b.dead.add("a")
    a.admission.admits_until = 0.0  # there is no such process any more
    assert await b.run_for(RECOVERY_S + 1) == ["b"]


async def test_a_limiter_that_ends_in_order_is_succeeded_at_once_and_its_holds_are_known(
    limiter: Callable[..., Limiter],
) -> None:
    a, b = limiter("a"), limiter("b")
    await a.run_for(10, b)
    a.admission.announce(hold("r", idempotency_key="once"), "gateway-a")
    await a.tenure.end()
    assert await b.run_for(RECOVERY_S + 1, a) == ["b"]
    assert b.admission.status("acct").held == 700
    assert b.admission._accounts["acct"].idempotent == {"once": "r"}
    assert await b.run_for(30, a) == ["b"], "an ended limiter takes no lease"


async def test_a_cut_limiter_admits_to_the_end_of_its_lease_and_goes_on_if_nobody_came(
    limiter: Callable[..., Limiter],
) -> None:
    a = limiter("a")
    await a.run_for(10)
    assert a.books is not None
    a.books.is_cut = True
    cut_at = a.time.now
    while a.admits:
        await a.run_for(0.1)
    assert LASTS_S - 3 < a.time.now - cut_at <= LASTS_S
    assert a.service._decide(Renew("g", (), 1)) == Renewed((), None), "gateways see it"
    a.time.now += 100
    a.books.is_cut = False
    assert await a.run_for(1) == ["a"]
    assert a.tenure.epoch == 1


async def test_an_answer_that_comes_late_does_not_lengthen_the_lease(limiter: Callable[..., Limiter]) -> None:
    a = limiter("a")
    await a.run_for(10)
    assert a.books is not None
    a.books.holds_calls = True
    sent_at = a.time.now
    turning = asyncio.create_task(a.tenure.turn())
    for after_s in (0.0, 15.0):  # the call, then its answer
        await asyncio.sleep(0)
        a.time.now += after_s
        a.books.held.pop().set_result(None)
        await asyncio.sleep(0)
    await turning
    assert a.admits
    a.time.now = sent_at + LASTS_S
    assert not a.admits


async def test_the_time_in_which_the_ledger_was_away_does_not_count_against_a_limiter_of_another_service(
    limiter: Callable[..., Limiter],
) -> None:
    """Meanwhile its gateways could not post their holds."""
    a, b = limiter("a"), limiter("b")
    await a.run_for(10, b)
    assert a.books is not None
    assert b.books is not None
    a.books.is_cut = b.books.is_cut = True
    await a.run_for(60, b)
    b.books.is_cut = False
    assert await b.run_for(10, a) == []
    a.books.is_cut = False
    assert await b.run_for(30, a) == ["a"]


async def test_the_lease_goes_to_where_the_requests_are_and_back(limiter: Callable[..., Limiter]) -> None:
    a, b = limiter("a"), limiter("b")
    await a.run_for(10, b)
    for _ in range(3):
        switched_at = a.time.now
        while not b.admits:
            b.wants(2)
            await a.run_for(0.1, b)
            assert a.time.now - switched_at < 10, "less than a gateway waits"
        for _ in range(30):
            a.wants()
            b.wants(2)
            await a.run_for(0.5, b)
            assert b.admits, "a few that still ask the other one do not move it"
        a, b = b, a


async def test_limiters_of_another_number_of_shards_wait_for_each_other(limiter: Callable[..., Limiter]) -> None:
    one = limiter("one")
    await one.run_for(10)
    three = [limiter(f"three-{shard}", shard=shard, shards=3) for shard in range(3)]

    async def turn_all(seconds: float) -> None:
        end = one.time.now + seconds
        while one.time.now < end:
            for each in (one, *three):
                if not each.is_paused:
                    await each.tenure.turn()
            assert not (one.admits and any(each.admits for each in three))
            one.time.now += 0.5

    await turn_all(30)
    assert one.admits
    one.is_paused = True
    await turn_all(30)
    assert [each.admits for each in three] == [True] * 3
    assert len({each.tenure.epoch for each in three}) == 3
    one.is_paused = False
    await turn_all(10)
    for each in three:
        await each.tenure.end()
    await turn_all(10)
    assert one.admits


# What a successor knows


def hold(request_id: str, **more: Any) -> OpenHold:
    return OpenHold(request_id, "acct", "k", 700, 150, 2, 5, 100, **more)


async def test_holds_that_gateways_post_count_until_they_are_no_longer_posted(
    limiter: Callable[..., Limiter], ledger: Ledger
) -> None:
    a = limiter("a")
    ledger.run(PostHolds("gateway-b/0", (hold("r1"), hold("r2"))))
    await a.run_for(10)
    assert a.admission.status("acct").open_requests == 2
    a.time.now += 100
    assert a.admission.expire() == []
    await a.run_for(1)
    ledger.run(PostHolds("gateway-b/0", (hold("r2"),)))
    await a.run_for(5)
    assert a.admission.status("acct").open_requests == 1
    # A gateway of this limiter's own keeps it from here on.
    a.admission.announce(hold("r2"), "gateway-a")
    ledger.run(PostHolds("gateway-b/0", ()))
    await a.run_for(5)
    assert a.admission.status("acct").open_requests == 1


async def test_nothing_is_decided_without_the_lease_and_a_repeated_ask_gets_the_present_epoch(
    limiter: Callable[..., Limiter],
) -> None:
    a = limiter("a")
    a.admission.apply(account_snapshot())
    a.admission.apply(key_snapshot())
    ask = Admit("r", "g", "d", "svc-chat", 10, 10, 2, 5)
    assert isinstance(a.service._decide(ask), Recovering)
    await a.run_for(10)
    grant = a.service._decide(ask)
    assert isinstance(grant, Grant)
    assert grant.epoch == 1
    a.time.now += 100
    assert isinstance(a.service._decide(ask), Recovering), "also for a request that is open here"
    assert isinstance(a.service._decide(Adjust("r", 10)), Recovering)
    await a.tenure._release()
    await a.run_for(10)
    assert a.service._decide(ask).epoch == 2


# Any order of events


@pytest.mark.parametrize(
    "count",
    [3, pytest.param(15, marks=pytest.mark.slow), pytest.param(100, marks=(pytest.mark.slow, pytest.mark.long))],
)
async def test_no_order_of_pauses_cuts_and_late_answers_lets_two_admit(empty: Path, tmp_path: Path, count: int) -> None:
    for seed in range(count):
        shutil.copy(empty, tmp_path / "ledger.db")
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await one_life(ledger, random.Random(seed))


async def one_life(ledger: Ledger, rng: random.Random) -> None:
    time, dead = Time(), set[str]()
    serial = 0

    def start(books: Books | None = None) -> Limiter:
        nonlocal serial
        serial += 1
        made = Limiter(f"l{serial}", ledger, time, dead, pace=rng.uniform(0.996, 1.004), books=books)
        assert made.books is not None
        made.books.holds_calls = True
        return made

    running = [start(), start()]
    epochs: list[int] = []

    def judge() -> None:
        admitting = [one for one in running if one.admits]
        assert len(admitting) <= 1, [(one.name, one.tenure.epoch) for one in admitting]
        for one in admitting:
            assert not epochs or one.admission.epoch >= epochs[-1]
            epochs.append(one.admission.epoch)

    async def step(one: Limiter) -> None:
        """It begins a turn that is due, or one call of its turn is executed or answered."""
        if one.turning is not None and one.turning.done():
            failed = one.turning.exception()
            assert failed is None or isinstance(failed, Unavailable), failed
            one.next_at = time.now + (POLL_S if failed else one.turning.result())
            one.turning = None
        if one.turning is None and time.now >= one.next_at:
            one.turning = asyncio.create_task(one.tenure.turn())
        elif one.books is not None and one.books.held:
            gate = one.books.held.pop(rng.randrange(len(one.books.held)))
            if not gate.done():
                gate.set_result(None)
        for _ in range(8):
            await asyncio.sleep(0)

    for _ in range(500):
        event = rng.random()
        one = rng.choice(running)
        assert one.books is not None
        if event < 0.02:
            one.is_paused = not one.is_paused
        elif event < 0.04:
            one.books.is_cut = not one.books.is_cut
        elif event < 0.05:
            # Its process ends, in order or not, and one of its service or another one starts.
            if one.turning is not None:
                one.turning.cancel()
            running.remove(one)
            dead.add(one.name)
            running.append(start(one.books if rng.random() < 0.5 else None))
        elif event < 0.06 and len(running) < 3:
            running.append(start())
        elif event < 0.1:
            one.wants(rng.randrange(1, 4))
        else:
            for each in running:
                if not each.is_paused:
                    await step(each)
                judge()
        time.now += rng.choice([0.0, 0.05, 0.3, 1.0]) if rng.random() < 0.97 else rng.uniform(1, 40)
        judge()
    for one in running:
        assert one.books is not None
        one.is_paused = one.books.is_cut = False
    for _ in range(600):
        for one in running:
            await step(one)
            judge()
        time.now += 0.1
    assert sum(one.admits for one in running) == 1, "and one does in the end"
    assert epochs
    for one in running:
        if one.turning is not None:
            one.turning.cancel()


# Processes


def test_a_process_is_known_to_have_ended_only_if_it_is_certain() -> None:
    code = "from serve_app.limiter.processes import process_name; print(process_name(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert not has_ended(name)
    child.kill()
    child.wait()
    assert has_ended(name)
    assert not has_ended(process_name())
    elsewhere = name.split(" ")
    for unknown in (" ".join(["other-boot", *elsewhere[1:]]), "", "x", f" {name.split(' ', 2)[2]}"):
        assert not has_ended(unknown), "of another machine or container"
