"""Reads and writes backups. A backup is one ZIP file with a copy of the database, followed by a manifest.

The copy is a SQLite file or an archive of pg_dump. An operator can also extract it with `unzip`. The manifest has the
copy's SHA-256, the time of its snapshot, and the number of rows in each table.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from serve_app.contracts.errors import InvalidValue

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a backup. Amounts of money are nano-units of `currency`."""

    kind: str  # "sqlite" or "postgresql"
    taken_at: float  # Unix seconds
    release: str  # release that made the backup
    revision: str  # schema revision
    runs_from: str  # a release runs on the schema if its last revision is this one or a later one
    rows: dict[str, int]  # by table
    currency: str | None
    balance: int  # sum over all accounts
    charged: int  # sum over all requests, including archived months
    last_settled: str | None  # request id
    last_settled_at: float | None
    server: str = ""  # PostgreSQL's version
    postgres_schema: str = ""
    copy: str = ""  # name of the copy in the file
    bytes: int = 0
    sha256: str = ""
    format: int = FORMAT


def write_copy(archive: zipfile.ZipFile, name: str, chunks: Iterator[bytes], *, packed: bool) -> dict[str, Any]:
    """Adds the copy and returns the manifest's data about it."""
    digest, size = hashlib.sha256(), 0
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED
    with archive.open(entry, "w", force_zip64=True) as member:
        for chunk in chunks:
            member.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return {"copy": name, "bytes": size, "sha256": digest.hexdigest()}


def write_manifest(archive: zipfile.ZipFile, manifest: Manifest) -> None:
    archive.writestr(MANIFEST, json.dumps(asdict(manifest), indent=2))


class BackupFile:
    """A backup opened for reading. Raises InvalidValue if the file is not a backup, is damaged or too new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise InvalidValue(f"{path} is not a complete backup of a ledger: use another file") from None
        except OSError as error:
            raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
        try:
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BackupFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._archive.close()

    def verify(self, progress: Callable[[str], None]) -> None:
        """Reads the whole copy. Raises InvalidValue if its size or checksum differs from the manifest."""
        digest, read, reported = hashlib.sha256(), 0, 0
        for chunk in self.chunks():
            digest.update(chunk)
            read += len(chunk)
            if read - reported >= 256 * CHUNK:
                reported = read
                progress(f"{read / max(1, self.manifest.bytes):.0%} of the backup is verified")
        if (digest.hexdigest(), read) != (self.manifest.sha256, self.manifest.bytes):
            raise self._damaged()

    def chunks(self) -> Iterator[bytes]:
        """Yields the copy in chunks. Raises InvalidValue where it is damaged."""
        try:
            with self._archive.open(self.manifest.copy) as member:
                yield from iter(lambda: member.read(CHUNK), b"")
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError):
            raise self._damaged() from None

    def _read_manifest(self) -> Manifest:
        try:
            found: dict[str, Any] = json.loads(self._archive.read(MANIFEST))
            if found["format"] > FORMAT:
                raise InvalidValue(f"{self._path} was made by release {found['release']}: restore it with that release")
            return Manifest(**{field.name: found[field.name] for field in fields(Manifest)})
        except KeyError:
            raise InvalidValue(f"{self._path} is not a backup of a ledger: use another file") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            raise self._damaged() from None

    def _damaged(self) -> InvalidValue:
        return InvalidValue(f"{self._path} is damaged: its checksum does not match; use another backup")
