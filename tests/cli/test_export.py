"""`serve-app usage export` writes a complete and exact file, or none."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from serve_app.storage.exports import REQUEST_COLUMNS, Csv, JsonArray

from .conftest import Run
from .fake_service import FakeService, error
from .local_http import Answer, Drop, Hang

REPOSITORY = Path(__file__).parents[2]
COLUMNS = ("name", "amount")


def page(first: int, count: int, after: str | None, charged: str = "0.5") -> Answer:
    rows = [
        dict.fromkeys(REQUEST_COLUMNS, "x") | {"request_id": f"r{n}", "charged": charged}
        for n in range(first, first + count)
    ]
    return Answer(200, {"data": rows, "next": after})


def parsed(form: str, text: str) -> list[dict[str, Any]]:
    return json.loads(text) if form == "json" else list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("form", ["csv", "json"])
def test_pages_become_one_file(service: FakeService, run: Run, tmp_path: Path, form: str) -> None:
    service.next.extend([page(0, 3, "a"), page(3, 3, "b"), page(6, 1, None)])
    done = run("usage", "export", "--format", form, "--output", tmp_path / "usage", "--json")
    assert done.json == {"file": str(tmp_path / "usage"), "format": form, "rows": 7, "charged": "3.5"}
    rows = parsed(form, (tmp_path / "usage").read_bytes().decode())
    assert [row["request_id"] for row in rows] == [f"r{n}" for n in range(7)]
    assert [request.query.get("after") for request in service.requests] == [None, "a", "b"]


def test_the_sum_of_large_charges_is_exact(service: FakeService, run: Run, tmp_path: Path) -> None:
    service.next.extend([page(0, 1, "a", "123456789.123456789"), page(1, 1, None, "0.000000001")])
    done = run("usage", "export", "--output", tmp_path / "usage", "--json")
    assert done.json["charged"] == "123456789.123456790"


@pytest.mark.parametrize("form", ["csv", "json"])
def test_standard_output_holds_the_export_and_nothing_else(service: FakeService, run: Run, form: str) -> None:
    service.next.append(page(0, 2, None))
    done = run("usage", "export", "--format", form)
    assert (done.code, done.err) == (0, "")
    assert len(parsed(form, done.out)) == 2


def test_with_json_standard_output_is_one_document(service: FakeService, run: Run) -> None:
    service.next.append(page(0, 2, None))
    assert len(run("usage", "export", "--json").json) == 2
    assert run("usage", "export", "--json", "--format", "csv").code == 2


def test_every_filter_is_sent(service: FakeService, run: Run) -> None:
    service.next.append(page(0, 0, None))
    options = "--account acct_1 --key key_1 --model svc-chat --from 2026-11-01 --to 2026-11-30"
    assert run("usage", "export", *options.split()).code == 0
    assert service.requests[-1].path == "/admin/usage/requests"
    assert service.requests[-1].query == {
        "account": "acct_1",
        "key": "key_1",
        "model": "svc-chat",
        "from": "2026-11-01",
        "to": "2026-11-30",
        "limit": "1000",
    }


def test_sums_can_be_exported_too(service: FakeService, run: Run) -> None:
    rows = parsed("csv", run("usage", "export", "--group-by", "day,model").out)
    assert rows == [
        {
            "day": "2026-11-02",
            "model": "svc-chat",
            "requests": "1200",
            "prompt_tokens": "34000",
            "cached_tokens": "12000",
            "completion_tokens": "5600",
            "charged": "0.012345678",
        }
    ]
    assert service.requests[-1].query == {"group_by": "day,model"}


@pytest.mark.parametrize(
    "options",
    [
        ["--format", "xlsx"],
        ["--from", "yesterday"],
        ["--from", "2026-11-02", "--to", "2026-11-01"],
        ["--group-by", "x"],
    ],
)
def test_invalid_export_options_are_refused_before_anything_is_sent(
    service: FakeService, run: Run, options: list[str]
) -> None:
    assert run("usage", "export", *options).code == 2
    assert service.requests == []


def test_options_before_the_word_export_are_a_usage_error(service: FakeService, run: Run) -> None:
    refused = run("usage", "--from", "2026-11-01", "export")
    assert refused.code == 2
    assert "after its name" in refused.error_line
    assert service.requests == []


def test_shared_options_may_stand_before_the_word_export(service: FakeService, run: Run) -> None:
    service.next.append(page(0, 2, None))
    assert len(run("usage", "--url", service.url, "--json", "export").json) == 2


def test_a_page_that_is_lost_is_asked_for_again(service: FakeService, run: Run) -> None:
    service.next.extend([page(0, 2, "a"), Drop(), page(2, 2, None)])
    assert len(run("usage", "export", "--json").json) == 4


def test_an_export_that_fails_leaves_the_older_file_as_it_was(service: FakeService, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out" / "usage.csv"
    target.parent.mkdir()
    target.write_text("older")
    service.next.extend([page(0, 2, "a"), error(503, "the ledger is away", "overloaded_error")])
    assert run("usage", "export", "--output", target).code == 1
    assert target.read_text() == "older"
    assert [path.name for path in target.parent.iterdir()] == ["usage.csv"]


def test_a_new_file_is_readable_by_its_owner_alone(service: FakeService, run: Run, tmp_path: Path) -> None:
    service.next.append(page(0, 1, None))
    run("usage", "export", "--output", tmp_path / "usage.csv")
    assert stat.S_IMODE((tmp_path / "usage.csv").stat().st_mode) == 0o600


@pytest.mark.parametrize("options", [[], ["--group-by", "day"]])
@pytest.mark.parametrize("output", ["missing/usage.csv", "."])
def test_a_path_that_can_not_be_written_is_reported_before_any_request(
    service: FakeService, run: Run, output: str, options: list[str]
) -> None:
    refused = run("usage", "export", *options, "--output", output)
    assert refused.code == 1
    assert output in refused.error_line
    assert service.requests == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_export_that_is_interrupted_leaves_nothing(service: FakeService, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    second_page = Hang()
    service.next.extend([page(0, 2, "a"), second_page])
    process = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "usage", "export", "--output", str(folder / "usage.csv")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=dict(os.environ),
        # A test runner started in the background ignores the signal, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    try:
        assert second_page.reached.wait(300)
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    finally:
        second_page.release.set()
        process.kill()
    assert (process.returncode, out) == (130, b"")
    assert re.fullmatch("([0-9]+ rows … [0-9]+ s\n)*", err.decode())  # progress, on a slow machine
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_file_of_many_requests_is_the_ledgers_sum(
    real: Any, run: Run, tmp_path: Path, form: str, count: int
) -> None:
    from tests.gateway.billed import bill

    charged = bill(real.world, count, every_s=60.0)
    target = tmp_path / "usage"
    period = ["--from", "2026-11-01", "--to", "2026-11-30"]
    done = run("usage", "export", *period, "--format", form, "--output", target, "--json").json
    rows = parsed(form, target.read_bytes().decode())
    assert done["rows"] == len(rows) == len({row["request_id"] for row in rows}) == count
    total = sum(Decimal(row["charged"]) for row in rows)
    assert Decimal(done["charged"]) == total == Decimal(charged) / 10**9
    assert real.world.ledger.account_totals(real.world.account_id).charged == charged
    summed = run("usage", "export", *period, "--group-by", "day,model", "--json").json
    assert sum(Decimal(row["charged"]) for row in summed) == total
    assert sum(row["requests"] for row in summed) == count


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-x", "@x", "\tx", "\rx", "\nx", "＝x", '=HYPERLINK("x")', "-", "=", "-1e5"]
)
def test_a_cell_that_would_compute_is_text(text: str) -> None:
    made = Csv(COLUMNS)
    [row] = csv.reader(io.StringIO(made.rows([{"name": text, "amount": "-0.50"}]), newline=""))
    assert row == [f"'{text}", "-0.50"]


@pytest.mark.parametrize(
    ("text", "cell"),
    [("a;=cmd|'/c x'!A0;", "a;'=cmd|'/c x'!A0;"), ("a;+1;-2", "a;'+1;'-2"), ("1+1=2", "1+1=2"), ("a; b", "a; b")],
)
def test_a_cell_computes_nothing_behind_a_semicolon_either(text: str, cell: str) -> None:
    made = Csv(COLUMNS)
    [row] = csv.reader(io.StringIO(made.rows([{"name": text, "amount": "1"}]), newline=""))
    assert row == [cell, "1"]


def test_rows_are_quoted_so_that_any_reader_gets_them_back() -> None:
    rows = [{"name": 'a,"b"\nc', "amount": 5}, {"name": None, "amount": None}, {"name": "ü€", "amount": 0}]
    made = Csv(COLUMNS)
    text = made.head() + made.rows(rows[:1]) + made.rows([]) + made.rows(rows[1:]) + made.tail()
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["name", "amount"], ['a,"b"\nc', "5"], ["", ""], ["ü€", "0"],
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [0, 2], [2, 0, 3], [1, 1, 1]])
def test_an_array_is_one_document_with_a_row_on_each_line_however_it_was_cut(sizes: list[int]) -> None:
    made = JsonArray(COLUMNS)
    text = made.head()
    count = 0
    for size in sizes:
        text += made.rows([{"name": f"n\n{number}", "amount": "1"} for number in range(count, count + size)])
        count += size
    whole = text + made.tail()
    assert json.loads(whole) == [{"name": f"n\n{number}", "amount": "1"} for number in range(count)]
    assert whole.count("\n") == (count + 2 if count else 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
