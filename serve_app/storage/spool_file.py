"""One file of a spool. Its process locks it, appends to it, and empties it when everything in it is settled."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from serve_app.contracts.books import Settlement
from serve_app.contracts.errors import SpoolFull
from serve_app.storage.private_files import open_private
from serve_app.storage.settlement_lines import from_line

logger = logging.getLogger(__name__)

REFUSED = ".refused"  # for the operator: unreadable lines, and settlements that the ledger neither settled nor stored


class SpoolFile:
    """One open, locked file. Calls must not overlap."""

    def __init__(self, path: Path, descriptor: int, flushed: bool) -> None:
        self.path = path
        self._flushed = flushed
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._settled = 0  # bytes at the start that are already settled
        self.waiting = 0  # lines that are not settled
        self.reply_bytes = 0  # bytes of replies in the file
        self.unflushed = False
        # Whether a crash cut off the last line. If so, the next append begins with a line feed.
        self._ragged = self.size > 0 and os.pread(descriptor, 1, self.size - 1) != b"\n"
        if self.size:
            with open(descriptor, "rb", closefd=False) as file:
                file.seek(0)
                self.waiting = sum(line != b"\n" for line in file)

    @property
    def has_more(self) -> bool:
        return self._settled < self.size

    @classmethod
    def open_locked(cls, path: Path, *, create: bool, flushed: bool) -> SpoolFile | None:
        """Opens and locks a file. Returns None if another process has it or, without `create`, it does not exist."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        while True:
            try:
                descriptor = os.open(path, flags, 0o600)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            try:
                # Between open and lock, the previous owner may have emptied and removed it.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                        if create and flushed:
                            flush_folder(path.parent)
                        return cls(path, descriptor, flushed)
            except BaseException:
                os.close(descriptor)  # otherwise it stays locked while this process lives
                raise
            os.close(descriptor)

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines and flushes them, or leaves the file as it was."""
        data = b"".join(lines)
        if self._ragged:
            data = b"\n" + data
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            if self._flushed:
                os.fsync(self._descriptor)
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, self.size)
            except OSError:
                self._ragged = True
                self.size = os.fstat(self._descriptor).st_size
            raise SpoolFull(
                f"cannot write to {self.path}: {error}; admit nothing until the disk works again"
            ) from error
        self.unflushed = not self._flushed
        self._ragged = False
        self.size += len(data)
        self.waiting += len(lines)

    def duplicate(self) -> int:
        """Returns a separate descriptor for flushing appended data, because another thread may close this file."""
        self.unflushed = False
        return os.dup(self._descriptor)

    def first(self) -> Settlement | None:
        """Returns the first unsettled settlement, or None."""
        return next((settlement for _, raw in self._raw_lines() if (settlement := from_line(raw)) is not None), None)

    def lines(self) -> Iterator[tuple[int, bytes, Settlement | None]]:
        """Returns unsettled lines: (offset after the line, the line, its settlement or None if it cannot be read)."""
        return ((offset, raw, self.read(offset, raw)) for offset, raw in self._raw_lines())

    def next_lines(self, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Returns the first unsettled lines: (offset after the line, line). Empties the file if there are none.

        Returns at most `limit` lines, and at most `max_bytes` unless the first line alone is longer.
        """
        lines: list[tuple[int, bytes]] = []
        size = 0
        for offset, raw in islice(self._raw_lines(), limit):
            size += len(raw)
            if lines and size > max_bytes:
                break
            lines.append((offset, raw))
        if not lines and self.size:
            self.mark_settled(self.size, 0)
        return lines

    def read(self, offset: int, raw: bytes) -> Settlement | None:
        """Returns the settlement of a line that ends at `offset`, or None if the line is torn or damaged."""
        settlement = from_line(raw)
        if settlement is None:
            logger.warning("%s: skipping a torn or damaged line that ends at byte %d", self.path.name, offset)
        return settlement

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        offset = self._settled
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(offset)
            for raw in file:
                offset += len(raw)
                if raw != b"\n":
                    yield offset, raw

    def mark_settled(self, offset: int, settled: int) -> None:
        """Marks everything before `offset`, which is `settled` lines, as settled."""
        self._settled = offset
        self.waiting -= settled
        if offset == self.size:
            os.ftruncate(self._descriptor, 0)
            # Set before the flush, which may fail: later lines are appended at the file's beginning in any case.
            self.size = self._settled = self.waiting = self.reply_bytes = 0
            if self._flushed:
                os.fsync(self._descriptor)

    def set_aside(self, lines: Sequence[bytes]) -> None:
        """Writes lines that can never be settled to the `.refused` file. Then they can be removed from the spool."""
        beside = self.path.with_name(self.path.name + REFUSED)
        with open(beside, "ab", opener=open_private) as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(beside.parent)

    def delete(self) -> None:
        """Deletes the file, then unlocks it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def flush_folder(folder: Path) -> None:
    """Makes the folder's file names survive a machine crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
