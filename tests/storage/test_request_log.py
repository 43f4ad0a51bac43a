"""The log of requests: what was written is found by any of its ids, and no file keeps a search from its end."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.units import utc_text
from serve_app.storage import request_log
from serve_app.storage.request_log import FOLDER, KEPT, SEARCH_LINES, Found, RequestLog, find_lines, recent_lines


def line(number: int, **more: Any) -> dict[str, Any]:
    return {
        "time": f"2026-11-01T08:00:00.{number:06}+00:00",
        "request_id": f"chatcmpl-{number}",
        "client_request_id": f"req_{number}",
        "trace_id": f"{number:032x}",
        "total_ms": 1.5,
    } | more


def write(path: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(one, ensure_ascii=False) for one in lines) + end)


def find(folder: Path, request_id: str, **bounds: float) -> Found:
    """Without `bounds`, a search that no machine is too slow for."""
    return find_lines(folder, request_id, **{"most_s": 600.0, **bounds})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "CLOSE_S", 60.0)


@pytest.mark.parametrize("asked", ["chatcmpl-7", "req_7", f"{7:032x}"])
def test_a_line_is_found_by_each_of_its_ids(tmp_path: Path, asked: str) -> None:
    log = RequestLog(tmp_path, "gateway-1")
    for number in range(20):
        log.write(line(number))
    log.close()
    found = find(tmp_path / FOLDER, asked)
    assert found.lines == [line(7)]
    assert found.is_complete


def test_rotated_files_and_those_of_other_processes_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_GATHERED", 1)
    monkeypatch.setattr(request_log, "FILE_BYTES", 1000)
    first, second = RequestLog(tmp_path, "gateway-1"), RequestLog(tmp_path, "replica-1")
    for number in range(20):
        first.write(line(number))
    second.write({"time": "2026-11-01T09:00:00+00:00", "event": "settled", "request_id": "chatcmpl-15"})
    first.close()
    second.close()
    assert len(list((tmp_path / FOLDER).iterdir())) > 3
    assert [one.get("event") for one in find(tmp_path / FOLDER, "chatcmpl-15").lines] == [None, "settled"]


def test_a_half_written_last_line_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", line(1), line(2), end='\n{"request_id":"chatcmpl-1","status":20')
    assert find(tmp_path, "chatcmpl-1").lines == [line(1)]


def test_an_id_in_another_field_is_no_match(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", line(1, reply="chatcmpl-2", account="chatcmpl-2"), ["chatcmpl-2"])  # type: ignore[arg-type]
    assert find(tmp_path, "chatcmpl-2").lines == []


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_nothing_is_found_where_there_is_no_log(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert find(tmp_path / folder, "chatcmpl-1").lines == []


def test_a_line_is_found_wherever_it_lies_in_a_big_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "BLOCK_BYTES", 1000)
    write(tmp_path / "a.jsonl", *(line(number, reply="é" * number) for number in range(400)))
    assert [find(tmp_path, f"chatcmpl-{number}").lines for number in range(400)] == [
        [line(number, reply="é" * number)] for number in range(400)
    ]


def test_an_id_that_a_client_sends_with_all_requests_finds_the_newest(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        write(tmp_path / f"{name}.jsonl", *(line(2 * one + number, client_request_id="same") for one in range(500)))
    found = [one["request_id"] for one in find(tmp_path, "same").lines]
    assert found == [f"chatcmpl-{number}" for number in range(1000 - SEARCH_LINES, 1000)]


def test_a_search_ends_at_its_bounds_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "BLOCK_BYTES", 100)
    for age, name in enumerate(("new", "old")):
        write(tmp_path / f"{name}.jsonl", *(line(number, file=name) for number in range(100)))
        os.utime(tmp_path / f"{name}.jsonl", (10**9 - age, 10**9 - age))
    size = (tmp_path / "new.jsonl").stat().st_size
    cut = find(tmp_path, "chatcmpl-99", most_bytes=size)
    assert [one["file"] for one in cut.lines] == ["new"]
    assert not cut.is_complete
    assert not find(tmp_path, "chatcmpl-1", most_s=0).is_complete
    assert len(find(tmp_path, "chatcmpl-99").lines) == 2


def test_the_oldest_files_leave_when_a_process_starts(tmp_path: Path) -> None:
    for age in range(KEPT + 5):
        write(tmp_path / FOLDER / f"{age}.jsonl", line(age))
        os.utime(tmp_path / FOLDER / f"{age}.jsonl", (10**9 - age, 10**9 - age))
    RequestLog(tmp_path, "gateway-1").close()
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {f"{age}.jsonl" for age in range(KEPT)}


def test_a_disk_that_hangs_costs_lines_and_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(request_log, "WAITING", 10)
    monkeypatch.setattr(request_log, "CLOSE_S", 0.05)
    monkeypatch.setattr(request_log._File, "emit", lambda *_: gate.wait())
    log = RequestLog(tmp_path, "gateway-1")
    for number in range(100):
        log.write({"request_id": str(number)})
    assert log._lines.qsize() <= 10
    log.close()
    gate.set()
    monkeypatch.setattr(request_log, "CLOSE_S", 60.0)
    log.close()
    assert not log._thread.is_alive()


def test_a_full_disk_is_reported_once_and_without_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(request_log._File, "shouldRollover", full)
    log = RequestLog(tmp_path, "gateway-1")
    for _ in range(3):
        log.write({"reply": "a secret"})
    log.close()
    [record] = [one for one in caplog.records if "log of requests" in one.message]
    assert "No space left" in record.message
    assert "secret" not in caplog.text


def test_only_files_that_were_open_when_a_request_ended_are_searched(tmp_path: Path) -> None:
    begins = datetime(2026, 11, 1, 8, tzinfo=UTC).timestamp()
    for hour in range(3):
        path = tmp_path / f"gateway-1.jsonl.{hour}"
        write(path, line(7, time=f"2026-11-01T{8 + hour:02d}:00:00.000+00:00", hour=hour))
        os.utime(path, (begins + hour * 3600 + 3000,) * 2)
    write(tmp_path / "cut.jsonl", line(7, hour="unknown"))
    (tmp_path / "cut.jsonl").write_text('{"time"' + (tmp_path / "cut.jsonl").read_text() + json.dumps(line(7, hour=9)))
    for ended_at, hours in [(begins + 1800, [0, 9]), (begins + 3600 + 1800, [1, 9]), (begins + 2 * 3600, [2, 9])]:
        found = find(tmp_path, "chatcmpl-7", ended_at=ended_at)
        assert sorted(one["hour"] for one in found.lines) == hours
    assert len(find(tmp_path, "chatcmpl-7").lines) == 4


START = 1_780_315_200.0


def minute(number: int, /, **more: Any) -> dict[str, Any]:
    """The line of a request that arrived in a minute after START."""
    return {"time": utc_text(START + 60 * number, "milliseconds"), "account": "acct_1", "number": number} | more


def recent(folder: Path, begins: int, ends: int, *wanted: bytes, **more: Any) -> tuple[list[int], bool]:
    """The numbers of the lines between two minutes after START."""
    found = recent_lines(folder, wanted, since=START + 60 * begins, until=START + 60 * ends, **more)
    return [one["number"] for one in found.lines], found.is_complete


@pytest.mark.parametrize("block", [64, 500, 10**6])
def test_the_lines_of_a_time_are_found_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(request_log, "RECENT_BLOCK_BYTES", max(block, 200))
    raw = [minute(number, account=f"acct_{number % 2}") for number in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in raw))
    assert recent(tmp_path, 10, 14) == ([10, 11, 12, 13, 14], True)
    assert recent(tmp_path, 10, 14, b'"account":"acct_1"') == ([11, 13], True)
    assert recent(tmp_path, 95, 500) == ([95, 96, 97, 98, 99], True)
    assert recent(tmp_path, -9, 2) == ([0, 1, 2], True)
    assert recent(tmp_path, 200, 300) == ([], True)
    assert recent(tmp_path, 0, 99, most=3) == ([97, 98, 99], True)


def test_lines_of_requests_that_ended_late_are_found_by_their_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "RECENT_BLOCK_BYTES", 200)
    lines = [minute(number) for number in range(50)]
    lines.insert(45, minute(30, number=1000))  # it ran for a quarter of an hour
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines))
    assert set(recent(tmp_path, 30, 46)[0]) == {1000, *range(30, 47)}


def test_a_search_by_time_ends_at_its_share_of_the_bytes_and_merges_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "RECENT_BLOCK_BYTES", 400)
    for name, first in (("a", 0), ("b", 1)):
        raw = [json.dumps(minute(number), separators=(",", ":")) for number in range(first, 200, 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(raw) + "\n")
    assert recent(tmp_path, 10, 14) == ([10, 11, 12, 13, 14], True)
    numbers, is_complete = recent(tmp_path, 0, 199, most_bytes=2000)
    assert not is_complete
    assert numbers[-1] == 199
    assert numbers == sorted(numbers)
    assert 2 < len(numbers) < 100
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write((json.dumps(minute(199, number=-1), separators=(",", ":")) + "\n") * 10)
    found = recent_lines(tmp_path, (), since=START, until=START + 60 * 199, most_bytes=4000)
    known = [one["number"] for one in found.lines if one["number"] >= (found.known_since - START) / 60]
    assert known == list(range(known[0], 200)), "since then, no process's requests are missing"
    assert len(known) < len([one for one in found.lines if one["number"] >= 0]), "one process's file was read further"


def test_broken_lines_and_missing_files_do_not_end_a_search_by_time(tmp_path: Path) -> None:
    good = json.dumps(minute(5), separators=(",", ":"))
    (tmp_path / "a.jsonl").write_text(f'{good}\n{good[:30]}\n[1]\n\n"account"\n{good[:-5]}')
    (tmp_path / "empty.jsonl").write_text("")
    assert recent(tmp_path, 0, 9) == ([5], True)
    assert recent(tmp_path / "none", 0, 9) == ([], True)
