"""The log of requests: what was written is found by any of its ids, and no file keeps a search from its end."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from serve_app.storage import request_log
from serve_app.storage.request_log import FOLDER, KEPT, SEARCH_LINES, Found, RequestLog, find_lines


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
