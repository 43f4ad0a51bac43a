"""Tables and verdicts are written from the records alone, and a promise that was not measured is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.engine import plan, report, verdicts
from bench.harness.results import Spread, spread
from bench.harness.tables import promise_table


def record(server: str, clients: int, number: int, rate: float, workload: str = plan.SHORT, **more: Any) -> Any:
    figures = {"tokens_per_s": rate, "ttft_p50_s": 0.1, "ttft_p95_s": 0.2, "token_p50_s": 0.01, "client_cpu": 0.03}
    base = {"server": server, "workload": workload, "clients": clients, "round": number, "problems": []}
    return {**base, **figures, "early": 0, "unanswered": 0, **more}


def results(*records: Any) -> Any:
    server = {"batches": True, "weight_bytes": 10**8, "peak_memory_bytes": 2**30, "idle_cpu": 0.01}
    return {
        "machine": {
            "cpu": "a processor", "family": "family 1", "cores": 2, "memory_bytes": 2**34, "flags": ["avx2"],
            "system": "Linux", "python": "3.11", "libraries": {"torch": "2"}, "read_bytes_per_s": 1e10,
        },
        "date": "2026-01-01", "seconds": 60.0, "rounds": 3, "window_s": [3.0, 12.0], "cut_short": False,
        "servers": {
            "ours": {**server, "title": "serve-app", "facts": {"settings": {"dtype": "int8"}}},
            "transformers": {**server, "title": "transformers serve", "facts": {"version": "5"}},
        },
        "missing": {"vllm": "not installed: make bench-engine-peers"},
        "records": list(records),
    }  # fmt: skip


def kept(found: Any, text: str) -> bool | None:
    return next(verdict for verdict in verdicts.verdicts(found) if text in verdict.promise.text).kept


def test_a_promise_is_kept_by_the_median_of_the_rounds_ratios() -> None:
    rounds = [(33.0, 10.0), (31.0, 10.0), (20.0, 10.0)]
    found = results(
        *(record("ours", 1, number, ours) for number, (ours, _) in enumerate(rounds)),
        *(record("transformers", 1, number, theirs) for number, (_, theirs) in enumerate(rounds)),
    )
    assert kept(found, "1 client, against `transformers serve`") is True
    worse = results(record("ours", 1, 0, 29.0), record("transformers", 1, 0, 10.0))
    assert kept(worse, "1 client, against `transformers serve`") is False


def test_rounds_that_one_of_both_lacks_are_left_out() -> None:
    found = results(
        record("ours", 1, 0, 10.0), record("ours", 1, 1, 40.0), record("transformers", 1, 1, 10.0)
    )  # fmt: skip
    assert verdicts.verdicts(found)[0].measured == Spread(4.0, 4.0, 4.0)


def test_what_was_not_measured_is_not_kept() -> None:
    found = results(record("ours", 1, 0, 100.0))
    assert kept(found, "vLLM") is None
    assert "not measured" in promise_table(verdicts.verdicts(found))


def test_a_wait_is_kept_when_it_is_small() -> None:
    for ratio, expected in ((0.1, True), (0.3, False)):
        found = results(record("ours", 1, 0, 1.0, plan.PREFIX, second_to_first=ratio))
        assert kept(found, "second turn") is expected


def test_a_measurement_with_a_problem_is_left_out_and_named() -> None:
    found = results(record("ours", 1, 0, 10.0), record("ours", 1, 1, 99.0, problems=["HTTP 503: busy"]))
    assert spread(found, "ours", plan.SHORT, 1, "tokens_per_s") == Spread(10.0, 10.0, 10.0)
    assert "HTTP 503: busy" in report.notes(found)


def test_early_stops_and_missing_servers_are_named() -> None:
    text = report.notes(results(record("transformers", 4, 0, 10.0, early=2)))
    assert "fewer tokens than asked for" in text
    assert "transformers serve, short, 4 clients" in text
    assert "vllm (not installed" in text


def test_a_report_has_a_row_for_each_server_and_a_column_for_each_number_of_clients() -> None:
    text = report.markdown(results(record("ours", 1, 0, 50.0), record("ours", 1, 1, 70.0), record("ours", 4, 0, 90.0)))
    assert "| serve-app | 60 (50 to 70) | 90 |" in text
    assert "|  | 1 client | 4 clients |" in text


def test_renewing_the_document_leaves_what_people_wrote(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"# Ours\n\nwritten\n\n{report.BEGIN}\nold\n{report.END}\n\nalso written\n")
    found = results(record("ours", 1, 0, 50.0), record("transformers", 1, 0, 10.0))
    report.write_docs(document, found)
    once = document.read_text()
    report.write_docs(document, found)
    assert document.read_text() == once
    assert once.startswith("# Ours\n\nwritten\n")
    assert once.endswith("also written\n")
    assert "old\n" not in once


def test_a_document_without_a_place_for_results_is_not_touched(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Ours\n")
    with pytest.raises(ValueError, match="needs the lines"):
        report.write_docs(document, results())
    assert document.read_text() == "# Ours\n"
