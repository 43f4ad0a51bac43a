"""The spool: settlements on disk, flushed one by one, for as long as the ledger's database is away.

One file a process, held by a lock for as long as the process lives; the lock of a dead process is free, which is how
another one finds what it left behind. A line is a checksum and a settlement as JSON, so a line torn by a crash shows.
A file is emptied only when all of it is settled. A crash before that settles some again, which changes nothing.

Keep the folder on a local disk: the locks are `flock`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from serve_app.ledger.errors import InvalidValue, SpoolBusy, SpoolFull
from serve_app.ledger.messages import Outcome, Price, Settled, Settlement, SettlementRejected, StoredReply

logger = logging.getLogger(__name__)

Settle = Callable[[Sequence[Settlement]], Sequence[Settled | SettlementRejected]]

REPLAY_BATCH = 64
SUFFIX = ".spool"
REFUSED = ".refused"  # what the ledger refused, and lines that cannot be read: for a human


class Spool:
    """The spool `name` in `folder`, taken over with what is in it. Threads may share it.

    Raises SpoolBusy while another process has it, InvalidValue for a name that is no plain file name.
    """

    def __init__(self, folder: str | Path, name: str, *, max_bytes: int = 64 * 2**20) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name, re.ASCII):
            raise InvalidValue(f"spool name {name!r}: use up to 100 of A-Z, a-z, 0-9, '.', '_' and '-'")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._replaying = threading.Lock()
        own = _SpoolFile.take(self._folder / (name + SUFFIX), create=True)
        if own is None:
            raise SpoolBusy(f"spool {name!r} in {self._folder} belongs to a running process: choose another name")
        self._own = own
        self._adopted: list[_SpoolFile] = []

    @property
    def size(self) -> int:
        """Bytes on disk, adopted files included; it shrinks when a file is settled as a whole."""
        with self._lock:
            return sum(file.size for file in self._files())

    def append(self, settlement: Settlement) -> None:
        """Keep a settlement; on disk when this returns.

        Raises SpoolFull when it would pass `max_bytes`, or the disk does not take it; nothing is kept then.
        """
        line = encode(settlement)
        with self._lock:
            if sum(file.size for file in self._files()) + len(line) > self.max_bytes:
                raise SpoolFull(f"the spool has reached {self.max_bytes} bytes: admit nothing until it was replayed")
            self._own.append(line)

    def pending(self) -> list[Settlement]:
        """What is not settled yet, adopted ones first, each file in its order."""
        with self._lock:
            return [one for file in self._files() for _, _, one in file.lines() if one is not None]

    def replay(self, settle: Settle) -> int:
        """Settle all that is pending, in order, and remove it; the number of settlements that were taken.

        What the ledger refuses moves to a `.refused` file beside the spool, with the reason in the log. What `settle`
        raises (LedgerUnavailable) ends the replay; what it has settled until then is not asked again by this process.
        """
        done = 0
        with self._replaying:
            with self._lock:
                files = self._files()
            for file in files:
                while (settled := self._replay_batch(file, settle)) is not None:
                    done += settled
                if file is not self._own:
                    with self._lock:
                        self._adopted.remove(file)
                        file.remove()
        return done

    def adopt_orphans(self) -> list[Settlement]:
        """Take over the spools of dead processes in this folder; the settlements gained. They count for `max_bytes`."""
        gained: list[Settlement] = []
        with self._lock:
            mine = {file.path for file in self._files()}
            for path in sorted(self._folder.glob("*" + SUFFIX)):
                if path in mine:
                    continue
                file = _SpoolFile.take(path, create=False)
                if file is None:
                    continue
                waiting = [one for _, _, one in file.lines() if one is not None]
                if file.size == 0:
                    file.remove()
                    continue
                logger.warning("adopted %s with %d settlements of a process that is gone", path.name, len(waiting))
                self._adopted.append(file)
                gained += waiting
        return gained

    def close(self) -> None:
        """Let go of the files, so that another process can have them; empty ones are removed."""
        with self._replaying, self._lock:
            for file in self._files():
                if file.size == 0:
                    file.remove()
                else:
                    file.close()
            self._adopted = []

    def _files(self) -> list[_SpoolFile]:
        return [*self._adopted, self._own]

    def _replay_batch(self, file: _SpoolFile, settle: Settle) -> int | None:
        """Settle the next lines of a file; None when it is empty. Other threads append meanwhile."""
        with self._lock:
            lines = file.next_lines(REPLAY_BATCH)
        if not lines:
            return None
        batch = [one for _, _, one in lines if one is not None]
        results = settle(batch) if batch else []
        if len(results) != len(batch):
            raise RuntimeError(f"{len(results)} results for {len(batch)} settlements")
        refused = [raw for _, raw, one in lines if one is None]
        for settlement, result in zip(batch, results, strict=True):
            if isinstance(result, SettlementRejected):
                logger.error("spooled settlement %r refused: %s", settlement, result.message)
                refused.append(encode(settlement))
        with self._lock:
            if refused:
                file.set_aside(refused)
            file.advance(lines[-1][0])
        return len(batch)


class _SpoolFile:
    """One open, locked file. The caller serialises the calls."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._settled = 0  # bytes at the start that are settled already
        # The end of a line was lost in a crash: the next one begins on a line of its own.
        self._ragged = self.size > 0 and os.pread(descriptor, 1, self.size - 1) != b"\n"

    @classmethod
    def take(cls, path: Path, *, create: bool) -> _SpoolFile | None:
        """The file, or None if it is another's (or, without `create`, not there)."""
        while True:
            try:
                descriptor = os.open(
                    path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600
                )
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            # Between open and lock, the one before may have emptied and removed it: then this is no file any more.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    if create:
                        _flush_folder(path.parent)
                    return cls(path, descriptor)
            os.close(descriptor)

    def append(self, line: bytes) -> None:
        """Add a line and flush it, or leave the file as it was."""
        if self._ragged:
            line = b"\n" + line
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            os.fsync(self._descriptor)
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, self.size)
            except OSError:
                self._ragged = True
                self.size = os.fstat(self._descriptor).st_size
            raise SpoolFull(f"cannot write to {self.path}: {error}; admit nothing until the disk is well") from error
        self._ragged = False
        self.size += len(line)

    def lines(self) -> Iterator[tuple[int, bytes, Settlement | None]]:
        """What is not settled: (offset behind the line, the line, its settlement or None if it cannot be read)."""
        offset = self._settled
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(offset)
            for raw in file:
                offset += len(raw)
                if raw == b"\n":
                    continue
                settlement = decode(raw)
                if settlement is None:
                    logger.warning("%s: skipping a torn or damaged line that ends at byte %d", self.path.name, offset)
                yield offset, raw, settlement

    def next_lines(self, limit: int) -> list[tuple[int, bytes, Settlement | None]]:
        """The first `limit` of `lines`; empties the file when there are none."""
        found = []
        for line in self.lines():
            found.append(line)
            if len(found) == limit:
                break
        if not found and self.size:
            self.advance(self.size)
        return found

    def advance(self, offset: int) -> None:
        """All before `offset` is settled."""
        self._settled = offset
        if offset == self.size:
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
            self.size = self._settled = 0

    def set_aside(self, lines: Sequence[bytes]) -> None:
        """Keep lines that will never settle, on disk, before they leave the spool."""
        beside = self.path.with_name(self.path.name + REFUSED)
        with open(beside, "ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(beside.parent)

    def remove(self) -> None:
        """Delete it, then let go of the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._descriptor)


def encode(settlement: Settlement) -> bytes:
    """A line of the spool."""
    fields = asdict(settlement)
    if settlement.reply is None:
        del fields["reply"]  # a release that keeps no replies can read it too
    else:
        fields["reply"]["body"] = base64.b64encode(settlement.reply.body).decode()
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> Settlement | None:
    """The settlement of a line, or None if the line is not whole."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        fields = json.loads(body)
        fields |= {"price": Price(**fields["price"]), "outcome": Outcome(fields["outcome"])}
        if (reply := fields.get("reply")) is not None:
            fields["reply"] = StoredReply(**reply | {"body": base64.b64decode(reply["body"], validate=True)})
        return Settlement(**fields)
    except (ValueError, TypeError, KeyError):
        return None  # written by another release: kept aside for a human


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
