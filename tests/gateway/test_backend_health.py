"""Tests of when a backend is taken out of an identifier's traffic, and when it comes back."""

from __future__ import annotations

import pytest

from serve_app.gateway.backend_health import ALONE_S, GOOD_PROBES, PAUSE_S, PROBE_S, WINDOW_S, BackendHealth, Verdict

GOOD, LATE, FAILED = Verdict.GOOD, Verdict.LATE, Verdict.FAILED
READY = {"old", "new"}


class Requests:
    """One gateway's requests for svc-chat, and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.health = BackendHealth(lambda: self.now)
        self._count = 0

    def end(self, backend: str, *verdicts: Verdict, account: str = "") -> None:
        """Ends requests of one account, or each of an account of its own."""
        for verdict in verdicts:
            self._count += 1
            self.health.note(("svc-chat", backend), f"r{self._count}", account or f"a{self._count}", verdict)

    def ejected(self, ready: set[str] = READY) -> list[str]:
        return [one.backend for one in self.health.judge("svc-chat", ready)]

    @property
    def out(self) -> set[str]:
        return {backend for _, backend in self.health.ejected}


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.mark.parametrize("bad", [FAILED, LATE])
def test_a_backend_that_fails_or_is_late_is_out_after_three_requests(requests: Requests, bad: Verdict) -> None:
    requests.end("old", *[GOOD] * 20)
    requests.end("new", bad, bad)
    assert requests.ejected() == []
    requests.end("new", bad)
    assert requests.ejected() == ["new"]
    assert requests.ejected() == [], "it is named once"
    assert requests.out == {"new"}


def test_some_failures_among_many_good_requests_eject_nothing(requests: Requests) -> None:
    requests.end("new", *[GOOD] * 5, *[FAILED] * 4)
    assert requests.ejected() == []


def test_what_happens_to_all_backends_ejects_none(requests: Requests) -> None:
    for backend in READY:
        requests.end(backend, *[LATE] * 8, *[GOOD] * 2)
    assert requests.ejected() == []
    requests.end("new", *[FAILED] * 10)
    assert requests.ejected() == []


@pytest.mark.parametrize("ready", [{"new"}, set(), {"new", "old"}])
def test_the_last_one_that_could_reply_is_never_ejected(requests: Requests, ready: set[str]) -> None:
    if "old" in ready:
        requests.end("old", *[FAILED] * 5)
        requests.end("new", *[GOOD] * 9)
        assert requests.ejected() == ["old"]
    requests.end("new", *[FAILED] * 20)
    assert requests.ejected(ready) == []


def test_failures_that_are_long_past_do_not_count(requests: Requests) -> None:
    requests.end("new", FAILED, FAILED)
    requests.now += WINDOW_S + 1
    requests.end("new", FAILED)
    assert requests.ejected() == []


def test_a_request_that_began_well_and_failed_counts_once(requests: Requests) -> None:
    for number in range(3):
        requests.health.note(("svc-chat", "new"), f"same{number}", f"a{number % 2}", GOOD)
        requests.health.note(("svc-chat", "new"), f"same{number}", f"a{number % 2}", FAILED)
    [ejection] = requests.health.judge("svc-chat", READY)
    assert ejection.reason == "3 failed, of 3 requests within 1 s (accounts: 2)"


def test_one_account_ejects_no_backend_that_serves_others(requests: Requests) -> None:
    requests.now += ALONE_S
    requests.end("old", GOOD, account="ben")
    requests.end("new", *[FAILED] * 100, account="eve")
    assert requests.ejected() == []
    requests.end("new", FAILED, account="ben")
    assert requests.ejected() == ["new"]


def test_an_account_has_one_vote_however_many_requests_it_sends(requests: Requests) -> None:
    for account in ("ada", "ben", "cem", "dan"):
        requests.end("new", GOOD, account=account)
    requests.end("new", *[FAILED] * 100, account="eve")
    requests.end("new", LATE, account="fay")
    assert requests.ejected() == []


def test_an_account_whose_requests_fail_on_every_backend_has_no_vote(requests: Requests) -> None:
    requests.end("old", *[GOOD] * 20)
    for backend in READY:
        requests.end(backend, *[FAILED] * 5, account="eve")
    requests.end("new", *[LATE] * 2, account="ben")
    assert requests.ejected() == []


def test_an_account_that_has_been_alone_ejects_by_its_own_requests(requests: Requests) -> None:
    requests.now += ALONE_S - 1
    requests.end("new", *[FAILED] * 3, account="ada")
    assert requests.ejected() == [], "others may have been served before the gateway started"
    requests.now += WINDOW_S
    requests.end("new", *[FAILED] * 3, account="ada")
    assert requests.ejected() == ["new"]
    requests.now += PAUSE_S
    requests.end("new", FAILED, account="ada")
    requests.ejected()
    assert requests.health.due_probes() == {}, "its probe alone counts, too"


def eject(requests: Requests) -> None:
    requests.end("new", *[FAILED] * 3)
    assert requests.ejected() == ["new"]


def test_after_a_pause_one_request_a_second_probes_it(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S - 0.1
    assert requests.health.due_probes() == {}
    requests.now += 0.1
    assert requests.health.due_probes() == {("svc-chat", "new"): frozenset()}
    assert requests.health.due_probes() == {}
    requests.now += PROBE_S
    assert requests.health.due_probes() == {("svc-chat", "new"): frozenset()}


def test_one_account_neither_keeps_a_backend_out_nor_sends_a_second_bad_probe(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S
    requests.end("new", FAILED, account="eve")
    requests.ejected()
    assert requests.health.due_probes() == {("svc-chat", "new"): frozenset({"eve"})}
    requests.end("new", *[GOOD] * GOOD_PROBES)
    requests.ejected()
    assert requests.out == set()


def test_good_probes_bring_it_back(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S
    requests.end("new", *[GOOD] * (GOOD_PROBES - 1))
    requests.ejected()
    assert requests.out == {"new"}
    requests.now += WINDOW_S + 5  # probes may be far apart
    requests.end("new", GOOD)
    requests.ejected()
    assert requests.out == set()


def test_bad_probes_begin_a_pause_of_twice_the_length(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S
    requests.end("new", GOOD, FAILED, FAILED)
    assert requests.ejected() == [], "the ejection goes on, and is not a new one"
    requests.now += PAUSE_S
    assert requests.health.due_probes() == {}
    requests.now += PAUSE_S
    assert requests.health.due_probes() == {("svc-chat", "new"): frozenset()}


def test_replies_that_had_begun_before_the_ejection_are_no_probes(requests: Requests) -> None:
    eject(requests)
    requests.now += 1
    requests.end("new", *[GOOD] * 5)
    requests.ejected()
    requests.now += PAUSE_S
    requests.ejected()
    assert requests.out == {"new"}


def test_a_backend_without_weight_is_forgotten(requests: Requests) -> None:
    eject(requests)
    requests.health.keep({("svc-chat", "old")})
    assert requests.out == set()
    requests.end("new", FAILED)
    assert requests.ejected() == [], "with a new share it begins anew"


def test_identifiers_are_judged_apart(requests: Requests) -> None:
    requests.end("new", *[FAILED] * 3)
    assert requests.health.judge("svc-coder", READY) == []
