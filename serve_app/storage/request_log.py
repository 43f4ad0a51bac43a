"""Writes one JSON line per request to files of bounded size. If a request's gateway dies, a replica writes the line.

The files are in `logs` of the state folder. `serve-app requests show` searches them. A log collector can read them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, BinaryIO, Final

from serve_app.contracts.periods import CLOCK_SKEW_S
from serve_app.contracts.units import DAY_S, utc_text
from serve_app.storage.private_files import open_private

FOLDER: Final = "logs"
FILE_BYTES: Final = 32 * 1024 * 1024
WAITING: Final = 10_000  # queued lines; more are dropped
GATHER_S: Final = 0.1  # lines that arrive within this time are written together
MAX_GATHERED: Final = 1000
CLOSE_S: Final = 3.0
REPORT_S: Final = 60.0
FILES: Final = 4  # per process, besides the current one
KEPT: Final = 60  # newest files, of all processes, that `_remove_old` never removes
KEPT_S: Final = DAY_S  # the other files stay if written to within this time: their processes may still run
#: Phases of a request, in order: name of the field without `_ms` → what the request waits for.
PHASES: Final[Mapping[str, str]] = {
    "admit": "the limiter's decision",
    "queue": "a free place at the replica",
    "prefill": "the first token of the reply",
    "decode": "the other tokens of the reply",
    "settle": "the ledger",
}
TEXTS: Final = ("messages", "reply")  # fields that only the lines of some accounts have (`logged_texts`)
PATTERN: Final = "*.jsonl*"  # glob pattern of the files
ID_FIELDS: Final = ("request_id", "first_request_id", "client_request_id", "trace_id")
BLOCK_BYTES: Final = 1024 * 1024  # searched in one step, during which other threads wait for the interpreter
# Limits of one search.
SEARCH_BYTES: Final = 2 * 1024**3
SEARCH_S: Final = 4.0
WRITTEN_WITHIN_S: Final = 60.0  # maximum delay between a request's end and the writing of its line
SEARCH_LINES: Final = 20  # maximum lines found: a client may send all of its requests under one id
# Limits of a search by time.
RECENT_BYTES: Final = 16 * 1024 * 1024
RECENT_LINES: Final = 2000
RECENT_BLOCK_BYTES: Final = 256 * 1024
_TIME: Final = re.compile(rb'"time":"([0-9TZ:.-]{20,32})"')

Line = dict[str, Any]

logger = logging.getLogger("ray.serve")


class RequestLog:
    """Writes lines in a separate thread: no request waits for the disk. `name` is the name of the process.

    A disk that hangs or is full loses lines and has no other effect.
    """

    def __init__(self, home: Path, name: str) -> None:
        folder = home / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(folder)
        self._file = _File(
            folder / f"{name}.jsonl", maxBytes=FILE_BYTES, backupCount=FILES, delay=True, encoding="utf-8"
        )
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self._lines: Queue[str | None] = Queue(WAITING)
        self._thread = threading.Thread(target=self._write_forever, name="request-log", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Queues a line without waiting. Drops it if the queue is full."""
        with contextlib.suppress(Full):
            self._lines.put_nowait(json.dumps(line, ensure_ascii=False, separators=(",", ":")))

    def close(self) -> None:
        """Writes the queued lines. Waits at most CLOSE_S for a free place in the queue, then CLOSE_S for the thread."""
        with contextlib.suppress(Full):
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _write_forever(self) -> None:
        is_open = True
        while is_open:
            texts = [self._lines.get()]
            if texts[0] is not None:
                time.sleep(GATHER_S)
            with contextlib.suppress(Empty):
                while len(texts) < MAX_GATHERED:
                    texts.append(self._lines.get_nowait())
            is_open = texts[-1] is not None
            if lines := [text for text in texts if text is not None]:
                self._file.handle(logging.makeLogRecord({"msg": "\n".join(lines)}))
        self._file.close()


class _File(RotatingFileHandler):
    """Logs write errors at most once a minute, without the line that could not be written."""

    _reported_at = -math.inf

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if time.monotonic() - self._reported_at > REPORT_S:
            self._reported_at = time.monotonic()
            logger.error("cannot write the log of requests: %s", sys.exc_info()[1])


@dataclass(frozen=True, slots=True)
class Found:
    """Log lines, oldest first. If not `is_complete`, the search ended before it had read all files.

    For a search by time: `lines` is complete from `known_since` (Unix time) on, except as `recent_lines` describes.
    """

    lines: list[Line]
    is_complete: bool = True
    known_since: float = 0.0


def find_lines(
    folder: Path,
    request_id: str,
    *,
    pattern: str = PATTERN,
    most_bytes: float = SEARCH_BYTES,
    most_s: float = SEARCH_S,
    ended_at: float | None = None,
) -> Found:
    """Returns the last SEARCH_LINES lines that have this id in one of ID_FIELDS.

    Reads the newest files first, and stops after about `most_bytes` or `most_s` seconds. With `ended_at`, the Unix time
    at which the request ended, it reads only files that can contain its line.
    """
    wanted, ends_at, left = json.dumps(request_id).encode(), time.monotonic() + most_s, most_bytes
    found: list[Line] = []
    for path in _newest_first(folder, pattern):
        if ended_at is not None and not _was_open(path, ended_at):
            continue
        for block in _blocks(path):
            if left <= 0 or time.monotonic() >= ends_at:
                return Found(found, is_complete=False)
            left -= len(block)
            if wanted in block:
                found += _lines_of(request_id, wanted, block)
                found = sorted(found, key=lambda line: str(line.get("time", "")))[-SEARCH_LINES:]
    return Found(found)


def _was_open(path: Path, at: float) -> bool:
    """Returns whether a line about a request that ended at this Unix time can be in this file."""
    try:
        if path.stat().st_mtime < at - CLOCK_SKEW_S:
            return False
        with path.open("rb") as file:
            first = json.loads(file.readline(BLOCK_BYTES))["time"]
        return datetime.fromisoformat(first).timestamp() <= at + WRITTEN_WITHIN_S
    except OSError:
        return False
    except (ValueError, TypeError, KeyError):  # a first line that is cut off or very long
        return True


def recent_lines(
    folder: Path,
    wanted: Collection[bytes],
    *,
    since: float,
    until: float,
    most: int = RECENT_LINES,
    most_bytes: int = RECENT_BYTES,
    pattern: str = PATTERN,
) -> Found:
    """Returns the latest lines that contain each of the texts `wanted` and whose requests arrived in a time range.

    Reads each file backwards from the end of the range. Each file gets an equal share of `most_bytes`; if a file has
    more to read, the result is not complete. If `until` is in the past, requests that ended after it may be missing,
    which the result does not report. Times are Unix seconds.
    """
    paths = [path for at, path in _with_times(folder, pattern) if at >= since]
    begins, ends = (utc_text(at, "milliseconds") for at in (since, until))
    found, is_complete, known_since = list[Line](), True, since
    for path in paths:
        left, some = most_bytes // len(paths), list[Line]()
        for block in _blocks_before(path, ends):
            left -= len(block)
            raws = [raw for raw in block.split(b"\n") if all(text in raw for text in wanted)]
            for raw in reversed(raws):
                line = _parsed(raw)
                if line is not None and begins <= str(line.get("time", "")) <= ends:
                    some.append(line)
            if len(some) >= most:
                known_since = max(known_since, _end_of(some[most - 1]))
                break
            if _is_before(block, begins):
                break
            if left <= 0:
                is_complete, known_since = False, max(known_since, _end_of(_parsed(block.partition(b"\n")[0]) or {}))
                break
        found += some[:most]
    found.sort(key=lambda line: str(line["time"]))
    if len(found) > most:
        known_since = max(known_since, _end_of({"time": found[-most]["time"]}))
    return Found(found[-most:], is_complete, known_since)


def _end_of(line: Line) -> float:
    """Returns the approximate Unix time at which a request ended and its line was written: the order of a file's lines.

    Returns 0.0 for an invalid line.
    """
    try:
        return datetime.fromisoformat(line["time"]).timestamp() + (line.get("total_ms") or 0.0) / 1000
    except (ValueError, TypeError, KeyError):
        return 0.0


def _blocks_before(path: Path, ends: str) -> Iterator[bytes]:
    """Yields blocks of whole lines backwards, beginning at `_position_after(ends)`."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        end = _position_after(file, ends)
        while end > 0:
            start = max(0, end - RECENT_BLOCK_BYTES)
            file.seek(start)
            if start:
                file.readline()  # skips the end of a line: the next block has this line
                start = file.tell()
            if start >= end:  # one line is longer than a block
                return
            yield file.read(end - start)
            end = start


def _position_after(file: BinaryIO, ends: str) -> int:
    """Returns the position of a line that was written after `ends`, or the end of the file.

    Lines are in the order in which their requests ended, but have the times at which the requests arrived. A long
    request therefore has an early time at a late position. The result may therefore be after the first line with a time
    after `ends`, but is never before it.
    """
    low = 0
    high = found = file.seek(0, os.SEEK_END)
    while high - low > RECENT_BLOCK_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        at = file.tell()
        time_of = _time_of(file.readline())
        if time_of is None or time_of <= ends:
            low = middle
        else:
            high, found = middle, at
    return found


def _is_before(block: bytes, begins: str) -> bool:
    """Returns whether all requests in a block arrived before a time."""
    return max(_TIME.findall(block), default=b"").decode() < begins


def _time_of(raw: bytes) -> str | None:
    found = _TIME.search(raw[:200])
    return None if found is None else found[1].decode()


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:  # the process died during the write
        return None
    return line if isinstance(line, dict) else None


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields a file in blocks of whole lines."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # the file may have been removed
        while block := file.read(BLOCK_BYTES):
            yield block + file.readline()


def _lines_of(request_id: str, wanted: bytes, block: bytes) -> Iterator[Line]:
    for raw in block.split(b"\n"):
        if wanted not in raw:
            continue
        line = _parsed(raw)
        if line is not None and request_id in [line.get(name) for name in ID_FIELDS]:
            yield line


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return [path for _, path in _with_times(folder, pattern)]


def _with_times(folder: Path, pattern: str) -> list[tuple[float, Path]]:
    """Returns the time of the last write and the path of each file, newest first."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # other processes rename and remove files here
            if path.is_file():
                found.append((path.stat().st_mtime, path))
    return sorted(found, reverse=True)


def _remove_old(folder: Path) -> None:
    for path in _newest_first(folder, PATTERN)[KEPT:]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
