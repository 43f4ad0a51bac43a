"""Tests of the limiter's reports to people who watch: loads of backends, and accounts with open requests."""

from __future__ import annotations

from typing import cast

import pytest

from serve_app.contracts.limiting import BackendLoad, Live, LiveReport, OpenHold, PressureReport, Renew, SpoolState
from serve_app.contracts.ports import BooksPort
from serve_app.limiter.limiter_service import LimiterService
from tests.limiter.world import CONTRACT, World, account_snapshot, key_snapshot

EVERY_S = 0.5  # between two reports of a replica


class Watched(World):
    """A limiter with the accounts `a`, `b` and `c`, and replicas that report."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("b", "c"):
            self.admission.apply(account_snapshot(name, 10**9))
            self.admission.apply(key_snapshot(f"d-{name}", f"k-{name}", name))
        self.done: dict[str, int] = {}

    def report(self, replica: str = "r", *, tokens: int = 0, age_s: float = 0.0, kv: float = 0.0, **more: int) -> None:
        """A report of `tokens` done since the last one; `more` are counts of requests and queued tokens."""
        self.done[replica] = self.done.get(replica, 1) + tokens
        counts = {"queued_prefill_tokens": 0, "waiting": 0, "running": 0} | more
        self.admission.report(
            PressureReport("smollm2", replica, queue_age_s=age_s, kv_used=kv, tokens_done=self.done[replica], **counts)
        )

    def under_pressure(self) -> None:
        for _ in range(12):
            self.wait(EVERY_S)
            self.report(age_s=3.0, waiting=5)

    def live(self, top: int = 10) -> LiveReport:
        return self.admission.live(Live(top))

    def load(self) -> BackendLoad:
        [load] = self.live().backends
        return load


@pytest.fixture
def world() -> Watched:
    return Watched()


def test_a_backends_load_is_that_of_its_replicas_together(world: Watched) -> None:
    world.report("r1", kv=0.2, running=3, waiting=0, queued_prefill_tokens=10)
    world.report("r2", kv=0.6, running=4, waiting=2, queued_prefill_tokens=5, age_s=0.5)
    load = world.load()
    assert (load.backend, load.replicas, load.running, load.waiting) == ("smollm2", 2, 7, 2)
    assert load.queued_prefill_tokens == 15
    assert load.kv_used == pytest.approx(0.4)
    assert load.queue_age_s == 0.0  # the lower median
    assert load.effective_share == 1.0


def test_the_rate_of_work_is_the_rise_of_the_tokens_of_all_replicas(world: Watched) -> None:
    for _ in range(120):
        world.wait(EVERY_S)
        world.report("r1", tokens=500)
        world.report("r2", tokens=50)
    assert world.load().tokens_per_s == pytest.approx(1100, rel=0.01)


def test_a_replica_that_is_silent_counts_no_more(world: Watched) -> None:
    world.report("r1", running=3)
    world.report("r2", running=4)
    for _ in range(8):
        world.wait(EVERY_S)
        world.report("r2", running=4)
    assert (world.load().replicas, world.load().running) == (1, 4)
    world.wait(4)
    assert (world.load().replicas, world.load().running, world.load().pressure) == (0, 0, 0.0)


def test_pressure_and_what_it_leaves_are_reported_for_backends_and_accounts(world: Watched) -> None:
    world.under_pressure()
    world.admission.apply(account_snapshot("b", 10**9, 2, weight=50))
    world.grant("r1", prompt=1, output=1, backend="smollm2")
    world.grant("r2", prompt=1, output=1, backend="smollm2", key_digest="d-b")
    world.grant("r3", prompt=1, output=1, backend="other", key_digest="d-c")
    assert world.load().pressure == pytest.approx(3.0 / 0.75)
    shares = {account.account_id: account.effective_share for account in world.live().accounts}
    assert shares["a"] == pytest.approx(world.load().effective_share)
    assert shares["b"] == pytest.approx(shares["a"] / 2)
    assert shares["c"] == 1.0
    assert 0 < shares["a"] < 1


def test_the_accounts_with_the_most_open_requests_come_first_then_those_that_hold_the_most(world: Watched) -> None:
    for number, key in enumerate(["d-c", "d-c", "d-b", "d"]):
        world.grant(f"r{number}", prompt=100 * (number + 1), output=10, key_digest=key)
    report = world.live()
    assert [(one.account_id, one.open_requests) for one in report.accounts] == [("c", 2), ("a", 1), ("b", 1)]
    assert report.open_requests == 4
    assert report.held == sum(one.held for one in report.accounts)
    assert [one.held for one in report.accounts] == [world.admission.status(name).held for name in ("c", "a", "b")]
    assert [one.account_id for one in world.live(top=1).accounts] == ["c"]
    assert world.live(top=0).accounts == ()


def test_an_account_shows_what_it_uses_of_its_tokens_per_minute_and_leaves_with_its_last_request(
    world: Watched,
) -> None:
    grant = world.grant("r", prompt=700, output=100)
    [account] = world.live().accounts
    assert (account.tokens.limit, account.tokens.remaining) == (CONTRACT.tpm, CONTRACT.tpm - grant.tokens_charged)
    world.end("r", prompt=700, output=1)
    assert world.live().accounts == ()
    assert (world.live().open_requests, world.live().held) == (0, 0)


def test_an_account_of_which_only_holds_are_known_is_listed(world: Watched) -> None:
    world.admission.announce(OpenHold("r", "stranger", "k", 500, 10, 1, 1, 10, backend="smollm2"), "g")
    [account] = world.live().accounts
    assert (account.account_id, account.name, account.open_requests, account.held) == ("stranger", "", 1, 500)


def test_a_limiter_without_a_lease_says_that_it_does_not_admit(world: Watched) -> None:
    assert world.live().admits
    world.admission.admits_until = world.now
    assert not world.live().admits


def test_watching_changes_nothing(world: Watched) -> None:
    world.under_pressure()
    world.grant("r", prompt=1, output=1, backend="smollm2")
    before, level = world.everything(), world.admission.shares.backends["smollm2"].controller.level
    world.live()
    assert world.everything() == before
    assert world.admission.shares.backends["smollm2"].controller.level == level
    assert world.live() == world.live()


async def test_the_limiters_process_answers(world: Watched) -> None:
    world.grant("r")
    service = LimiterService(world.admission, cast(BooksPort, object()), clock=lambda: world.now)
    [report] = await service.ask([Live(3)])
    assert report == world.live(3)


def test_gateways_are_shown_by_their_last_heartbeat_until_their_holds_would_end(world: Watched) -> None:
    spool = SpoolState(3, 900, 12.5, ledger_away=True)
    world.admission.renew(Renew("g-2", (), 1, 4, spool))
    world.admission.renew(Renew("g-1", ()))
    world.wait(1)
    world.admission.renew(Renew("g-1", (), 1, 7))
    shown = [(one.holder, one.open_requests, one.spool) for one in world.live().gateways]
    assert shown == [("g-1", 7, None), ("g-2", 4, spool)]
    world.wait(world.admission.lease_s - 1)
    assert [one.holder for one in world.live().gateways] == ["g-1"]
    world.wait(1)
    assert world.live().gateways == ()
