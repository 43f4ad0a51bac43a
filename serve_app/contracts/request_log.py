"""One JSON line for each request, in files of a bounded size: gateways write them, and replicas for dead gateways.

The files lie in `logs` of the state folder. `serve-app requests show` searches them; a log collector reads them there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

FOLDER: Final = "logs"
FILE_BYTES: Final = 32 * 1024 * 1024
FILES: Final = 4  # of one process, beside the one that is written
KEPT: Final = 40  # files of ended processes


class RequestLog:
    """Writes lines in a thread of its own: no request waits for the disk. `name` is the process's."""

    def __init__(self, home: Path, name: str) -> None:
        folder = home / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder)
        file = RotatingFileHandler(
            folder / f"{name}.jsonl", maxBytes=FILE_BYTES, backupCount=FILES, delay=True, encoding="utf-8"
        )
        file.setFormatter(logging.Formatter("%(message)s"))
        lines: SimpleQueue[Any] = SimpleQueue()
        self._queue = QueueHandler(lines)
        self._listener = QueueListener(lines, file)
        self._listener.start()

    def write(self, line: dict[str, Any]) -> None:
        """Never waits."""
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        self._queue.enqueue(logging.makeLogRecord({"msg": text}))

    def close(self) -> None:
        """Writes what waits."""
        self._listener.stop()
        for handler in self._listener.handlers:
            handler.close()


def find_lines(folder: Path, request_id: str) -> Iterator[dict[str, Any]]:
    """The lines of a request, by its id or that of its client, the newest files first."""
    wanted = json.dumps(request_id).encode()
    for path in sorted(folder.glob("*.jsonl*"), key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open("rb") as file:
            for raw in file:
                if wanted not in raw:
                    continue
                try:
                    line = json.loads(raw)
                except ValueError:  # the process died while it wrote
                    continue
                if request_id in (line.get("request_id"), line.get("client_request_id"), line.get("trace_id")):
                    yield line


def _remove_old(folder: Path) -> None:
    found = sorted(folder.glob("*.jsonl*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[KEPT:]:
        path.unlink(missing_ok=True)
