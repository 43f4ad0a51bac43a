"""The figures of an attack count every ordinary request once and hide no failure, and a broken promise shows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.attack import report
from bench.attack.__main__ import _options, scope_of
from bench.attack.figures import Probe, Sent, factor, health, is_settled, judged, recovered_s, window
from bench.attack.hostile import ATTACKS
from bench.attack.ordinary import sent
from bench.attack.service import Attacked
from bench.attack.session import Scope
from bench.attack.verdicts import verdicts
from bench.harness.replies import RawReply
from bench.harness.servers import deployment
from deployments import strict_config

GIVEN_UP_S = 30.0
MARKS = {"calm": (0.0, 10.0), "attack": (10.0, 20.0), "recovery": (20.0, 30.0), "control": (30.0, 40.0)}


def good(began: float, wait: float = 0.1, is_new: bool = False) -> Sent:
    return Sent(began, began + wait, began + wait + 0.01, 200, is_whole=True, is_new=is_new)


def refused(began: float, status: int = 429, is_new: bool = False) -> Sent:
    return Sent(began, None, began + 0.001, status, is_whole=False, is_new=is_new)


def given_up(began: float, status: int = 0) -> Sent:
    return Sent(began, None, None, status, is_whole=False)


def calm_run(more: list[Sent] | None = None) -> list[Sent]:
    return [good(at / 10) for at in range(400)] + (more or [])


def results(requests: list[Sent], probes: list[Probe] | None = None, **smuggled: Any) -> dict[str, Any]:
    record = {
        "title": "wrong keys",
        "what": "",
        "attacker": {
            "share": 0.2, "seconds": 10.0, "statuses": {"401": 1000}, "requests": 1001, "hung_up": 0, "cut": 1,
            "refused": 0, "opened": 2, "most_open": 2, "bytes_written": 10**6,
        },
        "control_share": 0.2,
        "service_share": 0.5,
        "others_share": {"calm": 0.01, "attack": 0.02},
        **judged(requests, probes or [], MARKS, GIVEN_UP_S),
    }  # fmt: skip
    machine = {
        "cores": 2, "cpu": "x", "family": "y", "memory_bytes": 2**34, "system": "Linux", "python": "3", "libraries": {},
    }  # fmt: skip
    calm = window(requests, *MARKS["calm"], GIVEN_UP_S)
    customer = {"case": "64 hang-ups", "calm": calm, "after": calm, "factor": 1.0}
    row = {"case": "two lengths", "statuses": [400], "closed": True, "problems": [], **smuggled}
    return {
        "machine": machine, "date": "2026-11-22", "seconds": 60.0, "scope": asdict(Scope()), "client_cpu": 0.02,
        "records": {"wrong-keys": record}, "customer": [customer], "smuggling": [row],
    }  # fmt: skip


def broken(found: dict[str, Any]) -> list[str]:
    return [verdict.promise.text for verdict in verdicts(found) if verdict.kept is False]


def test_a_window_has_the_requests_that_began_in_it() -> None:
    found = window([good(9.99), good(10.0), good(19.99, wait=5.0), good(20.0)], 10.0, 20.0, GIVEN_UP_S)
    assert (found["sent"], found["samples"], found["failed"]) == (2, 2, 0)
    assert found["worst"] == pytest.approx(5.0)


def test_the_percentile_is_one_of_the_samples_and_their_number_is_there() -> None:
    found = window([good(at / 100, wait=(at + 1) / 1000) for at in range(200)], 0.0, 10.0, GIVEN_UP_S)
    assert found["samples"] == 200
    assert found["p50"] == pytest.approx(0.100)
    assert found["p99"] == pytest.approx(0.198)


def test_a_request_that_never_came_back_counts_with_what_it_waited() -> None:
    found = window([good(1.0)] * 50 + [given_up(2.0), given_up(3.0, status=200)], 0.0, 10.0, GIVEN_UP_S)
    assert found["p99"] == GIVEN_UP_S
    assert found["failed"] == 2


def test_a_refusal_is_a_failure_and_no_short_wait() -> None:
    found = window([good(1.0), refused(2.0), refused(3.0, 503)], 0.0, 10.0, GIVEN_UP_S)
    assert (found["sent"], found["samples"], found["failed"]) == (3, 1, 2)
    assert found["statuses"] == {"200": 1, "429": 1, "503": 1}


def test_a_reply_that_breaks_after_its_first_token_is_a_failure() -> None:
    found = window([Sent(1.0, 1.1, 1.2, 200, is_whole=False)], 0.0, 10.0, GIVEN_UP_S)
    assert (found["samples"], found["failed"]) == (1, 1)


def test_first_uses_of_a_key_fail_with_the_others_and_leave_the_waits_alone() -> None:
    found = window([good(1.0), good(2.0, 9.0, is_new=True), refused(3.0, is_new=True)], 0.0, 10.0, GIVEN_UP_S)
    assert (found["new_keys"], found["new_keys_failed"], found["failed"]) == (2, 1, 1)
    assert found["worst"] == pytest.approx(0.1)


def test_an_empty_window_has_no_figures() -> None:
    empty, full = window([], 0.0, 1.0, GIVEN_UP_S), window([good(0.5)], 0.0, 1.0, GIVEN_UP_S)
    assert empty["p99"] is None
    assert factor(empty, full) is None
    assert factor(full, empty) is None
    assert factor(full, full) == 1.0


def test_a_flap_is_each_change_from_good_to_failed() -> None:
    statuses = [200, 200, 0, 0, 200, 503, 200]
    probes = [Probe("/health", float(at), at + 0.2, status) for at, status in enumerate(statuses)]
    probes += [Probe("/ready", at + 0.1, at + 0.2, 200) for at in range(7)]
    assert health(probes, 0.0, 10.0) == {"sent": 14, "failed": 3, "flaps": 2, "slowest": pytest.approx(0.2)}
    # One that failed before the window and stays so is no flap of the window.
    assert health(probes, 3.0, 10.0)["flaps"] == 1
    assert health(probes, 7.0, 10.0) == {"sent": 0, "failed": 0, "flaps": 0, "slowest": None}


def test_it_is_settled_when_the_last_requests_came_back_as_usual() -> None:
    assert is_settled([good(5.0), good(9.0)], 8.0, 0.1)
    assert not is_settled([good(5.0)], 8.0, 0.1), "none came back"
    assert not is_settled([good(9.0, wait=0.5)], 8.0, 0.1)
    assert not is_settled([good(9.0), refused(9.5)], 8.0, 0.1)
    assert is_settled([], 8.0, None)


def test_recovery_ends_with_the_last_request_that_suffered() -> None:
    requests = [good(20.0, 4.0), refused(23.5), good(24.0), good(25.0, is_new=True, wait=9.0), good(31.0, 4.0)]
    assert recovered_s(requests, 20.0, 30.0, 0.1) == pytest.approx(3.5)
    assert recovered_s([good(20.0)], 20.0, 30.0, 0.1) == 0.0


def test_a_run_that_keeps_all_promises_reports_no_failure() -> None:
    found = results(calm_run())
    assert broken(found) == []
    assert "**no**" not in report.markdown(found)
    assert "1 of 1 cases" in report.markdown(found)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (results(calm_run([good(15.0, 0.2)] * 10)), "wrong keys: p99"),
        (results(calm_run([refused(15.0)])), "requests that failed"),
        (results(calm_run(), [Probe("/ready", 12.0, 17.0, 0)]), "flaps"),
        (results(calm_run(), problems=["2 responses where 1 may come"]), "smuggling"),
    ],
    ids=["latency", "failures", "health", "smuggling"],
)
def test_a_promise_that_is_broken_shows(found: dict[str, Any], text: str) -> None:
    [only] = broken(found)
    assert text in only
    assert "**no**" in report.markdown(found)


def test_a_customer_that_becomes_slow_breaks_a_promise() -> None:
    found = results(calm_run())
    found["customer"].append({**found["customer"][0], "case": "512 hang-ups", "factor": 12.0})
    assert len(broken(found)) == 1
    assert "customer" in broken(found)[0]
    assert "| 512 hang-ups | 100 / 100 (100) | 100 / 100 (100) | 12.0 | 0 of 100 |" in report.customer(found)


def test_smuggling_cases_are_listed_by_what_they_got_and_wrong_ones_apart() -> None:
    found = results(calm_run())
    rows = [("a", [400], True, []), ("b", [400], True, []), ("c", [401, 201], False, ["two"]), ("d", [], True, [])]
    found["smuggling"] = [
        {"case": case, "statuses": statuses, "closed": closed, "problems": problems}
        for case, statuses, closed, problems in rows
    ]
    assert report.smuggling(found).splitlines()[4:] == [
        "| 401 201 | stays open | **c: two** |",
        "| 400 | closed | a; b |",
        "| none | closed | d |",
    ]


def test_trouble_outside_the_attack_breaks_no_promise() -> None:
    assert broken(results(calm_run([good(25.0, 9.0), refused(35.0)]))) == []


def test_an_attack_that_was_not_measured_is_not_promised() -> None:
    found = results(calm_run())
    kept = {verdict.promise.text: verdict.kept for verdict in verdicts(found)}
    assert sum(one is None for one in kept.values()) == len(ATTACKS) - 1
    assert broken({**found, "records": {}, "customer": [], "smuggling": []}) == []


def test_figures_beside_other_programs_are_called_bad() -> None:
    found = results(calm_run())
    assert "too much" not in report.markdown(found)
    found["records"]["wrong-keys"]["others_share"]["calm"] = 0.5
    assert "50%" in report.machine(found)
    assert "too much" in report.machine(found)


def test_what_came_over_the_socket_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    first = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    last = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    raw = RawReply(5.0, 2, [(7.0, head), (8.0, first), (9.0, last)], 9.0)
    # From before the connection was open, not from `sent_at`.
    assert sent(1.0, raw, is_new=False) == Sent(1.0, 8.0, 9.0, 200, is_whole=True)
    assert sent(1.0, RawReply(5.0, 2, [(7.0, head), (8.0, first)], 9.0), is_new=False).is_whole is False
    cut = RawReply(5.0, 2, [(7.0, head), (8.0, first)], None)
    assert sent(1.0, cut, is_new=True) == Sent(1.0, 8.0, None, 200, is_whole=False, is_new=True)
    assert sent(1.0, RawReply(5.0, 2, [], None), is_new=False).status == 0


def test_options_choose_attacks_and_bound_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert scope_of(_options([])) == Scope()
    scope = scope_of(_options(["--only", "smuggling", "wrong-keys", "--seconds", "7", "--no-control"]))
    assert (scope.attacks, scope.attack_s, scope.control_s) == (("wrong-keys", "smuggling"), 7.0, 0)
    assert scope_of(_options(["--quick"])).control_s == 0
    for wrong in (["--seconds", "61"], ["--rate", "1000"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            _options(wrong)
    capsys.readouterr()


@pytest.mark.parametrize("option", ["--host", "--port", "--url", "--target", "--address"])
def test_no_other_target_can_be_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options([option, "127.0.0.1"])
    assert "unrecognized" in capsys.readouterr().err


def test_the_service_runs_as_shipped_but_for_the_number_of_replicas(tmp_path: Path) -> None:
    config = Attacked(tmp_path).config()
    assert strict_config.find_problems(config) == []
    assert deployment(config, "Model")["num_replicas"] == 1
    assert deployment(config, "Limiter")["user_config"]["contract"]["rpm"] == 600
