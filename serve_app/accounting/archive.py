"""Moves closed months from the ledger to files. A checkpoint keeps their sums, so the books can still be verified.

The steps run in this order, and each is harmless to repeat:
1. Compare the rows with each other, write them to files, and add their sums to a "closing" checkpoint.
2. Store the files' checksum in the ledger. From then on, checks start from the closing, and the triggers allow the
   removal of the rows.
3. Remove charges with their postings, and usage rows, in batches. Entries for money received, given, corrected or
   expired stay: grants refer to them, a repeated command is recognised by them, and they are few.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from serve_app.accounting.check_books import Part, compare_part
from serve_app.accounting.checkpoints import advance, begin_checkpoint, next_part, remove_old
from serve_app.accounting.database import Database
from serve_app.accounting.dialects import rows_at_once
from serve_app.accounting.journal import EntryKind
from serve_app.accounting.schema import (
    archives,
    checkpoint_balances,
    checkpoints,
    head,
    journal_entries,
    postings,
    replies,
    usage,
)
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.units import DAY_S
from serve_app.storage.spool_file import flush_folder

#: Seconds from a month's end until the month can be archived, because usage may still arrive from a spool. After an
#: archive, the ledger rejects settlements of unknown requests that ended before the end of the archived months plus
#: half of this time, because those requests may already be settled and archived.
SETTLING_S = 2 * DAY_S
_FILES = {"usage": usage, "journal_entries": journal_entries, "postings": postings}
_MANIFEST = "manifest.json"

Progress = Callable[[str], None]


def archive_months(database: Database, before: str, folder: Path, now: float, progress: Progress) -> dict[str, Any]:
    """Archives all months before `before`, YYYY-MM, into a new folder. Returns a summary of the archive.

    Continues an earlier attempt that was interrupted. Raises InvalidValue, and Conflict if the rows do not add up or
    another process archives at the same time.
    """
    cutoff = month_begins(before)
    if now < cutoff + SETTLING_S:
        raise InvalidValue(
            f"usage of the months before {before} may still arrive: wait until two days after the start of {before}"
        )
    with database.snapshot() as connection:
        done = connection.execute(select(archives).where(archives.c.exported_at.is_not(None))).all()
    if later := [row.before for row in done if row.before > before]:
        raise InvalidValue(f"everything before {max(later)} is archived")
    if not any(row.before == before for row in done):
        _export(database, before, cutoff, folder, now, progress)
    return _remove(database, before, now, progress)


def month_begins(month: str) -> float:
    """Returns the Unix time at which a month begins. Raises InvalidValue."""
    try:
        return datetime.strptime(f"{month}-01", "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise InvalidValue(f"{month!r} is not a valid month: use YYYY-MM, the first month to keep") from None


def closed_before(connection: Connection) -> float:
    """Returns a Unix time. A request that ended before it, and has no usage row, may be in an archive."""
    last = connection.execute(select(func.max(archives.c.before)).where(archives.c.exported_at.is_not(None))).scalar()
    return 0.0 if last is None else month_begins(last) + SETTLING_S / 2


def _export(database: Database, before: str, cutoff: float, folder: Path, now: float, progress: Progress) -> None:
    if folder.exists():
        raise InvalidValue(f"{folder} exists: choose a new folder for the archive")
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    checkpoint_id, entry, number = _begin(database, before, cutoff, now)
    draft.mkdir(mode=0o700, parents=True)
    with ExitStack() as opened:
        files = {name: opened.enter_context(_Csv(draft / f"{name}.csv.gz")) for name in _FILES}
        for name, table in _FILES.items():
            files[name].rows([[column.name for column in table.columns]])
        while True:
            with database.snapshot() as connection:
                at = connection.execute(select(checkpoints).where(checkpoints.c.id == checkpoint_id)).one_or_none()
                if at is None:
                    raise Conflict("another process archives: wait for it")
                part = _next(connection, at, entry, number)
                if (part.entry, part.number) == (at.entry, at.number):
                    break
                if wrong := next(compare_part(connection, part), None):
                    raise Conflict(
                        f"the books do not balance, so nothing was archived: run a full check ({wrong.message})"
                    )
                entries = select(journal_entries).where(*part.of_entries(journal_entries.c.id))
                lines = select(postings).where(*part.of_entries(postings.c.entry_id))
                files["usage"].rows(connection.execute(part.usage_rows(*usage.columns)))
                files["journal_entries"].rows(connection.execute(entries.order_by(journal_entries.c.id)))
                files["postings"].rows(connection.execute(lines.order_by(postings.c.entry_id, postings.c.line)))
            with database.aside() as connection:
                if not advance(connection, checkpoint_id, part, (), now):
                    raise Conflict("another process archives: wait for it")
            progress(f"entry {part.entry:,} of {entry:,} written")
    checksum = _seal(draft, before, entry, number)
    flush_folder(draft)
    os.replace(draft, folder)
    flush_folder(folder.parent)  # the archive must be on disk before a row is removed
    with database.aside() as connection:
        mine = archives.c.checkpoint_id == checkpoint_id
        connection.execute(update(archives).where(mine).values(checksum=checksum, exported_at=now))
        connection.execute(update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(proven_at=now))
        # Checks that have not yet read these rows cannot continue, because the rows will be removed.
        behind = or_(checkpoints.c.entry < entry, checkpoints.c.number < number)
        of_checks = checkpoints.c.kind.in_(("last", "full"))
        connection.execute(update(checkpoints).where(of_checks, behind).values(kind="old"))
    remove_old(database, now)


def _begin(database: Database, before: str, cutoff: float, now: float) -> tuple[int, int, int]:
    """Creates a closing checkpoint without sums. Returns its id, and the archive's last entry and last number."""
    with database.aside() as connection:
        cut_off = select(archives.c.checkpoint_id).where(archives.c.exported_at.is_(None))
        given_up = connection.execute(cut_off).scalars().all()
        connection.execute(delete(archives).where(archives.c.checkpoint_id.in_(given_up)))
        connection.execute(update(checkpoints).where(checkpoints.c.id.in_(given_up)).values(kind="old"))
    remove_old(database, now)
    with database.snapshot() as connection:
        last = connection.execute(select(head.c.entry)).scalar_one()
        highest = connection.execute(select(func.coalesce(func.max(usage.c.number), 0))).scalar_one()
        entry = _last_before(connection, journal_entries.c.id, journal_entries.c.created_at, last, cutoff)
        number = _last_before(connection, usage.c.number, usage.c.settled_at, highest, cutoff)
    with database.aside() as connection:
        checkpoint_id = begin_checkpoint(connection, "closing", now)
        at = connection.execute(select(checkpoints).where(checkpoints.c.id == checkpoint_id)).one()
        entry, number = max(entry, at.entry), max(number, at.number)
        row = {"checkpoint_id": checkpoint_id, "before": before, "entry": entry, "number": number}
        connection.execute(insert(archives).values(row))
    return checkpoint_id, entry, number


def _last_before(connection: Connection, number: Any, at: Any, last: int, cutoff: float) -> int:
    """Returns the number of the last row before `cutoff`. Uses bisection, because times increase with the numbers."""
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        query = select(number, at).where(number <= middle, number > low).order_by(number.desc()).limit(1)
        row = connection.execute(query).one_or_none()
        if row is None or row[1] < cutoff:
            low = middle
        else:
            high = row[0] - 1
    return low


def _next(connection: Connection, at: Any, entry: int, number: int) -> Part:
    part = next_part(connection, at, rows_at_once(connection))
    return Part(at.entry, at.number, min(part.entry or 0, entry), min(part.number or 0, number))


class _Csv:
    """A new compressed CSV file, flushed to disk when it is closed. The same rows give the same bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._gzip = gzip.GzipFile("", "wb", 4, self._file, mtime=0)
        self._text = io.TextIOWrapper(self._gzip, "utf-8", newline="")
        self._writer = csv.writer(self._text)

    def __enter__(self) -> _Csv:
        return self

    def __exit__(self, *_: object) -> None:
        self._text.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def rows(self, rows: Any) -> None:
        self._writer.writerows(rows)


def _seal(draft: Path, before: str, entry: int, number: int) -> str:
    """Writes the manifest and returns its checksum."""
    sums = {f"{name}.csv.gz": _sha256(draft / f"{name}.csv.gz") for name in _FILES}
    manifest = {"before": before, "last_entry": entry, "last_number": number, "sha256": sums}
    with (draft / _MANIFEST).open("x", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return _sha256(draft / _MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(database: Database, before: str, now: float, progress: Progress) -> dict[str, Any]:
    with database.snapshot() as connection:
        row = connection.execute(select(archives).where(archives.c.before == before)).one()
        closing = connection.execute(select(checkpoints).where(checkpoints.c.id == row.checkpoint_id)).one()
        earlier = archives.c.before < before
        ends = func.coalesce(func.max(archives.c.entry), 0), func.coalesce(func.max(archives.c.number), 0)
        entry, number = connection.execute(select(*ends).where(earlier)).one()
        size = max(1, rows_at_once(connection) // 4)
    while row.removed_at is None and (entry < row.entry or number < row.number):
        part = Part(entry, number, min(entry + size, row.entry), min(number + size, row.number))
        with database.aside() as connection:
            _remove_part(connection, part)
        entry, number = part.entry or 0, part.number or 0
        progress(f"entry {entry:,} of {row.entry:,} removed")
    with database.aside() as connection:
        mine = archives.c.checkpoint_id == row.checkpoint_id
        connection.execute(update(archives).where(mine, archives.c.removed_at.is_(None)).values(removed_at=now))
    return {"before": before, "entries": closing.entries, "usage_rows": closing.usage_rows, "checksum": row.checksum}


def _remove_part(connection: Connection, part: Part) -> None:
    of_charges = (journal_entries.c.kind == EntryKind.CHARGE.value, *part.of_entries(journal_entries.c.id))
    charges = select(journal_entries.c.id).where(*of_charges)
    gone = part.usage_rows(usage.c.request_id).subquery()
    connection.execute(delete(replies).where(replies.c.request_id.in_(select(gone.c.request_id))))
    connection.execute(delete(usage).where(*part.of_entries(usage.c.entry_id)))
    connection.execute(delete(usage).where(*part.of_numbers()))
    connection.execute(delete(postings).where(postings.c.entry_id.in_(charges)))
    connection.execute(delete(journal_entries).where(*of_charges))


def verify_archive(database: Database, folder: Path) -> dict[str, Any]:
    """Compares the checksums of an archive's files, and the sums of its postings, with those in the ledger.

    Raises InvalidValue for a folder that is not an archive of this ledger, and Conflict if the files were changed.
    """
    try:
        manifest, checksum = json.loads((folder / _MANIFEST).read_text()), _sha256(folder / _MANIFEST)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{folder} is not an archive: {error}") from None
    with database.snapshot() as connection:
        row = connection.execute(select(archives).where(archives.c.before == manifest.get("before"))).one_or_none()
        if row is None:
            raise InvalidValue(f"the ledger has no archive of the months before {manifest.get('before')}")
        kept = select(checkpoint_balances).where(checkpoint_balances.c.checkpoint_id == row.checkpoint_id)
        sums = {one.ledger_account: one.amount for one in connection.execute(kept)}
    if checksum != row.checksum:
        raise Conflict(f"{folder / _MANIFEST} was changed: its checksum is not {row.checksum}")
    for name, expected in manifest["sha256"].items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise Conflict(f"{folder / name} was changed: its checksum is not {expected}")
    with gzip.open(folder / "postings.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            sums[line["ledger_account"]] = sums.get(line["ledger_account"], 0) - int(line["amount"])
    if wrong := {name: off for name, off in sums.items() if off}:
        raise Conflict(f"the postings of {folder} do not match the ledger's closing: {wrong}")
    return {"before": row.before, "checksum": checksum}
