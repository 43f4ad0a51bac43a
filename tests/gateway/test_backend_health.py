"""Tests of when a backend is taken out of an identifier's traffic, and when it comes back."""

from __future__ import annotations

import pytest

from serve_app.gateway.backend_health import GOOD_PROBES, PAUSE_S, PROBE_S, WINDOW_S, BackendHealth, Verdict

GOOD, LATE, FAILED = Verdict.GOOD, Verdict.LATE, Verdict.FAILED
READY = {"old", "new"}


class Requests:
    """One gateway's requests for svc-chat, and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.health = BackendHealth(lambda: self.now)
        self._count = 0

    def end(self, backend: str, *verdicts: Verdict) -> None:
        for verdict in verdicts:
            self._count += 1
            self.health.note(("svc-chat", backend), f"r{self._count}", verdict)

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
        requests.health.note(("svc-chat", "new"), f"same{number}", GOOD)
        requests.health.note(("svc-chat", "new"), f"same{number}", FAILED)
    [ejection] = requests.health.judge("svc-chat", READY)
    assert ejection.reason == "of 3 requests in 1 s 3 failed"


def eject(requests: Requests) -> None:
    requests.end("new", *[FAILED] * 3)
    assert requests.ejected() == ["new"]


def test_after_a_pause_one_request_a_second_probes_it(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S - 0.1
    assert requests.health.due_probes() == set()
    requests.now += 0.1
    assert requests.health.due_probes() == {("svc-chat", "new")}
    assert requests.health.due_probes() == set()
    requests.now += PROBE_S
    assert requests.health.due_probes() == {("svc-chat", "new")}


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


def test_a_bad_probe_begins_a_pause_of_twice_the_length(requests: Requests) -> None:
    eject(requests)
    requests.now += PAUSE_S
    requests.end("new", GOOD, FAILED)
    assert requests.ejected() == [], "the ejection goes on, and is not a new one"
    requests.now += PAUSE_S
    assert requests.health.due_probes() == set()
    requests.now += PAUSE_S
    assert requests.health.due_probes() == {("svc-chat", "new")}


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
