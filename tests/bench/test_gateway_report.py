"""The report of the gateway benchmark follows from its records alone: ratios, the books, failures."""

from __future__ import annotations

from typing import Any

from bench.gateway import report
from bench.gateway.session import turns
from bench.gateway.systems import BARE, FULL, LITELLM, SYSTEMS
from bench.gateway.verdicts import verdicts


def record(server: str, clients: int, number: int, rate: float, **more: Any) -> Any:
    return {
        "server": server, "workload": "complete", "clients": clients, "round": number, "requests": int(10 * rate),
        "seconds": 10.0, "requests_per_s": rate, "p50_ms": 1000 * clients / rate, "p90_ms": 1.0, "p99_ms": 2.0,
        "max_ms": 3.0, "cpu_ms": 4.0, "cpu_ms_by_part": {"Gateway": 3.0, "HAProxy": 1.0}, "client_cpu": 0.05,
        "machine_load": 1.0, "non_2xx": 0, "broken": 0, "timeouts": 0, "problems": [], **more,
    }  # fmt: skip


def audit(**more: Any) -> Any:
    sound = {"answered": 100, "cut_at_most": 16, "settled": 101, "exact": True, "books_sound": True}
    return {"server": FULL, "round": 0, **sound, **more}


def results(*records: Any, audits: tuple[Any, ...] = ()) -> Any:
    if not records:
        rates = {FULL: 400.0, BARE: 600.0, LITELLM: 200.0}
        records = tuple(record(name, n, 0, rate) for name, rate in rates.items() for n in (1, 16, 64))
    titles = {FULL: "serve-app", BARE: "bare Ray Serve", LITELLM: "LiteLLM proxy"}
    return {
        "machine": {
            "cpu": "a processor", "family": "family 1", "cores": 2, "memory_bytes": 2**34, "system": "Linux",
            "python": "3.11", "libraries": {"ray": "2"},
        },
        "date": "2026-01-01", "seconds": 60.0, "rounds": 1, "window_s": 10, "warm_up_s": 5,
        "servers": {name: {"title": titles[name], "facts": {"version": "1"}} for name in SYSTEMS},
        "missing": {}, "records": list(records), "audits": list(audits),
    }  # fmt: skip


def kept(found: Any) -> dict[str, bool | None]:
    return {verdict.promise.text: verdict.kept for verdict in verdicts(found)}


def test_promises_are_judged_by_the_ratios_of_a_round() -> None:
    assert kept(results()) == {
        "requests/s at 16 clients, against the LiteLLM proxy": True,
        "requests/s at 64 clients, against the LiteLLM proxy": True,
        "p50 at 1 client, against the LiteLLM proxy": True,
        "requests/s at 16 clients, against the bare path": True,
        "requests/s at 64 clients, against the bare path": True,
    }


def test_a_slower_median_at_one_client_breaks_its_promise() -> None:
    found = kept(results(record(FULL, 1, 0, 99.0), record(LITELLM, 1, 0, 100.0)))
    assert found["p50 at 1 client, against the LiteLLM proxy"] is False


def test_what_was_not_measured_is_not_kept() -> None:
    assert set(kept(results(record(FULL, 16, 0, 400.0))).values()) == {None}


def test_a_load_in_which_requests_failed_is_left_out_and_named() -> None:
    found = results(
        record(FULL, 16, 0, 400.0, non_2xx=3, problems=["3 replies that were not 2xx"]), record(LITELLM, 16, 0, 200.0)
    )
    assert kept(found)["requests/s at 16 clients, against the LiteLLM proxy"] is None
    text = report.notes(found)
    assert "of 6000: 3." in text
    assert "Left out: serve-app, 16 clients, round 1: 3 replies that were not 2xx" in text


def test_the_report_has_the_replies_that_the_books_were_compared_with() -> None:
    assert "100 replies; each of them is in the ledger" in report.notes(results(audits=(audit(),)))
    text = report.notes(results(audits=(audit(settled=99, exact=False),)))
    assert "**the ledger has 99, books sound**" in text


def test_a_report_has_a_row_for_each_system_and_a_column_for_each_number_of_clients() -> None:
    text = report.markdown(results())
    assert "|  | 1 client | 16 clients | 64 clients |" in text
    assert "| serve-app | 400 | 400 | 400 |" in text
    assert "| Gateway | 3.00 | 3.00 | 3.00 |" in text


def test_systems_take_turns_back_and_forth() -> None:
    assert list(turns(3, "abc")) == [
        (0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (2, "c"),
    ]  # fmt: skip
