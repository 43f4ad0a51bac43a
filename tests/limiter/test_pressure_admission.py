"""Pressure in the limiter: texts of refusals, what headers show, and that a refusal consumes nothing."""

from __future__ import annotations

from random import Random
from typing import Any, cast

from serve_app.contracts.limiting import Admit, Grant, Heard, PressureReport, Refusal, Release
from serve_app.contracts.limits import Contract
from serve_app.contracts.ports import BooksPort
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from tests.limiter.world import account_snapshot, key_snapshot

CONTRACT = Contract(rpm=1_000, tpm=600_000, concurrency=100)
BACKEND = "b"


class Limiter:
    """Admission with the accounts `light` (weight 50) and `heavy` (weight 200), and a clock."""

    def __init__(self) -> None:
        self.now = 5_000.0
        self.admission = Admission(lambda: self.now, Random(7), CONTRACT, recovery_s=0.0)
        for account_id, weight in (("light", 50), ("heavy", 200)):
            self.admission.apply(account_snapshot(account_id, 10**15, 1, weight=weight))
            self.admission.apply(key_snapshot(f"d-{account_id}", f"k-{account_id}", account_id, True, 1))
        self._number = 0

    def reports(self, seconds: float, age_s: float, waiting: int = 1) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.admission.report(PressureReport(BACKEND, "r", age_s, 0.5, 0, waiting if age_s else 0, 32))

    def ask(self, account_id: str = "light", prompt: int = 500, backend: str = BACKEND) -> Any:
        self._number += 1
        ask = Admit(f"r{self._number}", "g", f"d-{account_id}", "svc-chat", prompt, 100, 1, 1, backend=backend)
        return self.admission.admit(ask)

    def until_refused(self, account_id: str = "light") -> Refusal:
        for _ in range(1_000):
            answer = self.ask(account_id)
            if isinstance(answer, Refusal):
                return answer
        raise AssertionError("never refused")


def test_over_its_share_an_account_gets_429_that_names_the_load_and_its_effective_limit() -> None:
    limiter = Limiter()
    limiter.reports(6, age_s=3.0)
    refusal = limiter.until_refused()
    assert (refusal.status, refusal.code) == (429, "tokens")
    assert refusal.tokens is not None
    assert refusal.tokens.limit < CONTRACT.tpm
    assert f"from 600000 to {refusal.tokens.limit}" in refusal.message
    assert "load" in refusal.message
    assert refusal.retry_after_s is not None
    assert 0 < refusal.retry_after_s <= 60


def test_the_grants_window_shows_the_effective_limit() -> None:
    limiter = Limiter()
    before = limiter.ask()
    limiter.reports(6, age_s=3.0)
    light, heavy = limiter.ask("light"), limiter.ask("heavy")
    assert before.tokens.limit == CONTRACT.tpm
    assert light.tokens.limit < heavy.tokens.limit < CONTRACT.tpm
    assert abs(heavy.tokens.limit - 4 * light.tokens.limit) <= 4


def test_requests_on_another_backend_are_not_restricted() -> None:
    limiter = Limiter()
    limiter.reports(6, age_s=3.0)
    limiter.until_refused()
    answer = limiter.ask(backend="other")
    assert isinstance(answer, Grant)
    assert answer.tokens.limit == CONTRACT.tpm


def test_a_refusal_by_load_consumes_nothing() -> None:
    limiter = Limiter()
    limiter.reports(6, age_s=3.0)
    limiter.until_refused()
    held, opened = limiter.admission.status("light").held, limiter.admission.status("light").open_requests
    first = limiter.ask()
    for _ in range(100):
        last = limiter.ask()
    assert first.requests.remaining == last.requests.remaining
    assert first.tokens == last.tokens
    assert limiter.admission.status("light").held == held
    assert limiter.admission.status("light").open_requests == opened


def test_a_request_that_did_not_run_is_given_back_to_the_share() -> None:
    limiter = Limiter()
    limiter.reports(6, age_s=3.0)
    grant = limiter.ask(prompt=50_000)
    assert isinstance(grant, Grant)
    assert isinstance(limiter.ask(), Refusal)
    limiter.admission.release(Release(grant.request_id, 0, 0, refused=True))
    assert isinstance(limiter.ask(), Grant)


def test_a_long_prompt_that_is_refused_after_admission_delays_no_other_request() -> None:
    limiter = Limiter()
    for half_second in range(60):  # a slow replica, seen at work
        limiter.now += 0.5
        limiter.admission.report(PressureReport(BACKEND, "r", 0.1, 0.5, 0, 1, 32, 50 * half_second))
    limiter.admission.release(Release(limiter.ask(prompt=100).request_id, 100, 1))
    grant = limiter.ask(prompt=30_000)
    assert isinstance(grant, Grant)
    assert isinstance(limiter.ask(), Refusal), "it would wait for its account's own prompt"
    assert isinstance(limiter.ask("heavy"), Grant)
    limiter.now += 0.3
    limiter.admission.release(Release(grant.request_id, 0, 0, refused=True))
    assert isinstance(limiter.ask(), Grant)


def test_what_a_request_used_replaces_its_estimate_on_the_share() -> None:
    limiter = Limiter()
    limiter.reports(6, age_s=3.0)
    grant = limiter.ask(prompt=10)
    limiter.admission.release(Release(grant.request_id, 10, 60_000))
    refusal = limiter.ask()
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s > 50


def test_within_its_share_an_account_gets_503_when_the_wait_would_pass_the_deadline() -> None:
    limiter = Limiter()
    limiter.reports(30, age_s=90.0)
    refusal = limiter.ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, "overloaded")
    assert "90 s" in refusal.message
    waits = {limiter.ask().retry_after_s for _ in range(50)}
    assert len(waits) == 50  # spread, so that they do not return together
    assert all(50 <= wait <= 60 for wait in waits)
    assert limiter.admission.status("light").open_requests == 0


async def test_the_service_takes_reports_and_returns_the_number_of_shards() -> None:
    limiter = Limiter()
    service = LimiterService(limiter.admission, cast(BooksPort, None), shards=3)
    told = []
    for _ in range(12):
        limiter.now += 0.5
        told += await service.ask([PressureReport(BACKEND, "r", 3.0, 0.5, 0, 5, 32)])
    assert told == [Heard(3, 0.0)] * 12
    assert limiter.ask().tokens.limit < CONTRACT.tpm
