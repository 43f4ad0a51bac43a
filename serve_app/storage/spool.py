"""The spool: stores settlements on disk until the ledger has them, for example while its database is unavailable.

Files are about a megabyte and locked while their process lives. The locks of a dead process are free, so another
process can adopt its files. A line is a checksum and a settlement as JSON, so a line torn by a crash is recognised. A
file is removed once all its lines are settled, so the spool shrinks while it is replayed. If the process crashes before
that, the settled lines of the remaining files are settled again, which changes nothing.

Keep the folder on a local disk: the locks are `flock`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.errors import InvalidValue, SpoolBusy, SpoolFull
from serve_app.storage.settlement_lines import reply_size, to_line
from serve_app.storage.spool_file import SpoolFile, flush_folder

logger = logging.getLogger(__name__)

Settle = Callable[[Sequence[Settlement]], Sequence[Settled | SettlementRejected]]

REPLAY_BATCH = 64
# Maximum size of a batch, unless its first line alone is longer. A message between machines has at most 8 MiB.
MAX_BATCH_BYTES = 2 * 2**20
SUFFIX = ".spool"
ORPHANS = ".orphans"  # files of model replicas: settlements that apply only if no gateway settles the request
FILE_BYTES = 2**20
REPLIES = 0.25  # share of `max_bytes` that stored replies may use; the rest is for usage


class Spool:
    """The spool `name` in `folder`, including its existing contents. Threads may share it.

    Raises SpoolBusy while another process has it, and InvalidValue for a name that is not a plain file name.
    """

    def __init__(
        self, folder: str | Path, name: str, *, max_bytes: int = 64 * 2**20, suffix: str = SUFFIX, flushed: bool = True
    ) -> None:
        """Without `flushed`, a machine crash can lose data appended since the last `flush`; a process crash can't."""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name, re.ASCII):
            raise InvalidValue(f"spool name {name!r}: use up to 100 of A-Z, a-z, 0-9, '.', '_' and '-'")
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name = name
        self._suffix = suffix
        self._flushed = flushed
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._replaying = threading.Lock()
        self._begun = 0  # number of files begun after the first one
        self._has_new_file = True  # whether a machine crash may still lose a new file's folder entry
        own = SpoolFile.open_locked(self._folder / (name + suffix), create=True, flushed=flushed)
        if own is None:
            raise SpoolBusy(f"spool {name!r} in {self._folder} belongs to a running process: choose another name")
        self._own = own
        self._earlier: list[SpoolFile] = []  # adopted files, and full files of this process

    @property
    def size(self) -> int:
        """Bytes on disk, including adopted files. It shrinks when a whole file is settled."""
        with self._lock:
            return sum(file.size for file in self._files())

    @property
    def waiting(self) -> int:
        """Number of settlements that are not settled yet."""
        with self._lock:
            return sum(file.waiting for file in self._files())

    @property
    def oldest_at(self) -> float | None:
        """Unix time of the end of the request whose settlement has waited longest; None if none waits."""
        with self._lock:
            ends = [settlement.finished_at for file in self._files() if (settlement := file.first()) is not None]
        return min(ends, default=None)

    def append(self, settlement: Settlement) -> None:
        """Stores a settlement. If the spool is `flushed`, the settlement is on disk when this returns.

        Raises SpoolFull and stores nothing if it would exceed `max_bytes` or the disk cannot hold it.
        """
        if not self.append_batch([settlement]):
            raise SpoolFull(f"the spool has reached {self.max_bytes} bytes: admit nothing until it is replayed")

    def append_batch(self, settlements: Sequence[Settlement]) -> int:
        """Stores as many of the first settlements as `max_bytes` allows. Returns their number.

        If the spool is `flushed`, one flush brings them to the disk before this returns. If stored replies would exceed
        their share of the limit, a settlement is stored without its reply: a client's retry is then a new request.
        Raises SpoolFull and stores nothing if the disk cannot hold the settlements.
        """
        lines: list[bytes] = []
        with self._lock:
            free = self.max_bytes - sum(file.size for file in self._files())
            replies = int(REPLIES * self.max_bytes) - sum(file.reply_bytes for file in self._files())
            reply_bytes = 0
            for settlement in settlements:
                size = reply_size(settlement)
                if size and size > replies - reply_bytes:
                    logger.warning(
                        "the spool has no room for the reply to %s: only its usage is stored", settlement.request_id
                    )
                    settlement, size = replace(settlement, reply=None, response=None), 0
                line = to_line(settlement)
                if len(line) > free:
                    break
                free -= len(line)
                reply_bytes += size
                lines.append(line)
            if lines:
                if self._own.size >= FILE_BYTES:
                    self._begin_file()
                self._own.append(lines)
                self._own.reply_bytes += reply_bytes
        return len(lines)

    def flush(self) -> None:
        """Makes all appended data survive a machine crash. Raises the disk's OSError; the next call retries."""
        with self._lock:
            unflushed = [(file, file.duplicate()) for file in self._files() if file.unflushed]
            has_new_file = bool(unflushed) and self._has_new_file
            self._has_new_file &= not has_new_file
        failure: OSError | None = None
        for file, descriptor in unflushed:  # without the lock, so that no other thread waits for the disk
            try:
                os.fsync(descriptor)
            except OSError as error:
                failure, file.unflushed = error, True
            finally:
                os.close(descriptor)
        if has_new_file:
            try:
                flush_folder(self._folder)
            except OSError as error:
                failure, self._has_new_file = error, True
        if failure is not None:
            raise failure

    def replay(
        self, settle: Settle, is_due: Callable[[Settlement], bool] | None = None, *, most: int = REPLAY_BATCH
    ) -> None:
        """Settles the waiting settlements in order and removes them.

        A batch has at most `most` settlements and MAX_BATCH_BYTES. Each file is replayed only up to the first
        settlement that is not due, according to `is_due`.

        Settlements that the ledger refuses and does not store move to a `.refused` file next to the spool; the log has
        the reason. An error of `settle` (LedgerUnavailable) ends the replay. This process does not settle again what
        was settled before the error.
        """
        with self._replaying:
            with self._lock:
                files = self._files()
            for file in files:
                while self._settle_batch(file, settle, is_due, most):
                    pass
                with self._lock:
                    if file is not self._own and not file.has_more:
                        self._earlier.remove(file)
                        file.delete()

    def adopt_orphans(self) -> list[Settlement]:
        """Adopts the spools of dead processes in this folder and returns their settlements.

        The adopted files count towards `max_bytes`.
        """
        adopted: list[Settlement] = []
        with self._replaying:  # not `_lock`, so that other threads can append while a large file is read
            with self._lock:
                own = {file.path for file in self._files()}
            for path in sorted(set(self._folder.glob("*" + self._suffix)) - own):
                try:
                    adopted += self._adopt(path)
                except OSError as error:
                    logger.error("cannot read the spool %s of another process; it stays for now: %s", path, error)
        return adopted

    def _adopt(self, path: Path) -> list[Settlement]:
        file = SpoolFile.open_locked(path, create=False, flushed=self._flushed)
        if file is None:
            return []
        try:
            waiting = [settlement for _, _, settlement in file.lines() if settlement is not None]
        except OSError:
            file.close()
            raise
        if file.size == 0:
            file.delete()
            return []
        logger.warning("adopted %s with %d settlements of a process that has ended", path.name, len(waiting))
        file.reply_bytes = sum(map(reply_size, waiting))
        with self._lock:
            self._earlier.append(file)
        return waiting

    def close(self) -> None:
        """Unlocks the files, so that another process can adopt them. Removes empty files."""
        with self._replaying, self._lock:
            for file in self._files():
                if file.size == 0:
                    file.delete()
                else:
                    file.close()
            self._earlier = []

    def _files(self) -> list[SpoolFile]:
        return [*self._earlier, self._own]

    def _begin_file(self) -> None:
        """Begins a new file for further settlements. The previous file can be removed once it is settled."""
        self._begun += 1
        # Spool names cannot contain "+", so no other process has this file.
        path = self._folder / f"{self._name}+{self._begun}{self._suffix}"
        try:
            file = SpoolFile.open_locked(path, create=True, flushed=self._flushed)
        except OSError as error:
            raise SpoolFull(f"cannot write to {path}: {error}; admit nothing until the disk works again") from error
        if file is not None:
            self._earlier.append(self._own)
            self._own, self._has_new_file = file, True

    def _settle_batch(
        self, file: SpoolFile, settle: Settle, is_due: Callable[[Settlement], bool] | None, most: int
    ) -> bool:
        """Settles the next lines of a file. Meanwhile, other threads can append.

        Returns False if there are no lines, or the first one is not due.
        """
        with self._lock:
            found = file.next_lines(most, MAX_BATCH_BYTES)
        read = ((offset, raw, file.read(offset, raw)) for offset, raw in found)
        lines = list(takewhile(lambda line: is_due is None or line[2] is None or is_due(line[2]), read))
        if not lines:
            return False
        batch = [settlement for _, _, settlement in lines if settlement is not None]
        results = settle(batch) if batch else []
        if len(results) != len(batch):
            raise RuntimeError(f"{len(results)} results for {len(batch)} settlements")
        refused = [raw for _, raw, settlement in lines if settlement is None]
        for settlement, result in zip(batch, results, strict=True):
            if isinstance(result, SettlementRejected) and not result.kept:
                logger.error("spooled settlement %r refused: %s", settlement, result.message)
                refused.append(to_line(settlement))
        with self._lock:
            if refused:
                file.set_aside(refused)
            file.mark_settled(lines[-1][0], len(lines))
        return True


def measure(spool: Spool) -> tuple[int, int, float]:
    """Returns the number of waiting settlements, their bytes, and the age of the oldest.

    The age is the seconds since the end of the request whose settlement has waited longest; 0 if none waits.
    """
    waiting, oldest_at = spool.waiting, spool.oldest_at
    return waiting, spool.size, 0.0 if oldest_at is None else max(0.0, time.time() - oldest_at)
