"""`serve-app plan` replays usage: what it counts is what is in the records, and every option is checked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.storage.exports import REQUEST_COLUMNS, Csv

from .conftest import Run
from .fake_service import FakeService
from .local_http import Answer

BEGAN = datetime(2026, 11, 2, 8, tzinfo=UTC)


def usage(count: int, gap_s: float = 1.0) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        at = (BEGAN + timedelta(seconds=number * gap_s)).isoformat().replace("+00:00", "Z")
        row: dict[str, Any] = dict.fromkeys(REQUEST_COLUMNS, "x") | {"request_id": f"r{number}"}
        row |= {"started_at": at, "account_id": f"a{number % 3}", "backend": "b"}
        row |= {"prompt_tokens": 1000, "cached_tokens": 200, "completion_tokens": 100}
        rows.append(row | {"price_input": "0.27", "price_cached_input": "0.07", "price_output": "1.10"})
    return rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    encoder = Csv(REQUEST_COLUMNS)
    path = tmp_path / "nov.csv"
    path.write_text(encoder.head() + encoder.rows(usage(600)), newline="")
    return path


def test_policies_are_compared_on_the_same_requests(run: Run, file: Path) -> None:
    both = run(
        "plan", "--from", file, "--policy", "fixed:1", "--policy", "fixed:2", "--replica-price", "3.60", "--json"
    )
    assert both.json["requests"] == 600
    one, two = both.json["policies"]
    assert (one["policy"], two["policy"]) == ("fixed:1", "fixed:2")
    # (800 × 0.27 + 200 × 0.07 + 100 × 1.10) / 10⁶ × 600
    assert one["revenue"] == two["revenue"] == "0.20"
    # From the first request to ten minutes after the last, at 0.001 a second.
    assert (one["cost"], two["cost"]) == ("1.20", "2.40")
    assert (one["refused"], one["most_replicas"], two["mean_replicas"]) == (0, 1, 2)
    assert one["first_token_p95_s"] >= two["first_token_p95_s"] > 0


def test_the_records_of_the_service_are_read_page_by_page(run: Run, service: FakeService) -> None:
    rows = usage(30)
    service.next.extend([Answer(200, {"data": rows[:20], "next": "a"}), Answer(200, {"data": rows[20:], "next": None})])
    assert run("plan", "--since", "2026-11-01", "--until", "2026-11-30", "--json").json["requests"] == 30
    assert [request.query.get("after") for request in service.requests] == [None, "a"]
    assert service.requests[0].query["from"] == "2026-11-01"


def test_prices_limits_and_devices_change_the_outcome(run: Run, file: Path) -> None:
    slow = ("--device", "slots=4,prefill=2000,step_ms=50,row_ms=5")
    plain = run("plan", "--from", file, *slow, "--policy", "fixed:1", "--json").json["policies"][0]
    dear = run("plan", "--from", file, *slow, "--policy", "fixed:4", "--price", "0.54/0.14/2.20", "--json")
    assert dear.json["policies"][0]["revenue"] == "0.41"
    assert plain["refused"] > 0
    assert dear.json["policies"][0]["refused"] == 0
    tight = run("plan", "--from", file, "--limit", "rpm=10", "--json").json["policies"][0]
    assert tight["refused"] > 200


def test_days_and_backends_are_filters(run: Run, file: Path) -> None:
    assert run("plan", "--from", file, "--since", "2026-11-03").error_line.startswith("error: there is no usage")
    assert run("plan", "--from", file, "--backend", "other").code == 1
    assert run("plan", "--from", file, "--until", "2026-11-02", "--backend", "b", "--json").json["requests"] == 600


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--replicas", "4"), "--replicas 4"),
        (("--replicas", "4:1"), "--replicas 4:1"),
        (("--policy", "best"), "--policy best"),
        (("--policy", "fixed:0"), "--policy fixed:0"),
        (("--setting", "fill"), "--setting fill"),
        (("--setting", "fil=1"), "--setting fil"),
        (("--limit", "rpm=0"), "--limit rpm"),
        (("--price", "0.27"), "--price 0.27"),
        (("--device", "speed=1"), "--device speed=1"),
        (("--device", "slots=0"), "--device slots=0"),
    ],
)
def test_a_wrong_option_is_named(run: Run, file: Path, arguments: tuple[str, ...], word: str) -> None:
    failed = run("plan", "--from", file, *arguments)
    assert failed.code == 2
    assert word in failed.error_line


def test_a_file_that_is_no_export_is_named_with_its_row(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "row 1 is none of a usage export" in run("plan", "--from", tmp_path / "other.csv").error_line
    assert "can't be read" in run("plan", "--from", tmp_path / "none.csv").error_line
