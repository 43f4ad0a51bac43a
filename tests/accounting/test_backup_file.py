"""A backup that is damaged or does not fit is refused, and PostgreSQL's programs are run with care."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import postgres_tools
from serve_app.accounting.backup_file import BackupFile
from serve_app.accounting.database import Database, revisions
from serve_app.contracts.errors import Conflict, InvalidValue, LedgerError, SchemaMismatch, ToolMissing

from .backups import back_up, change_manifest, restored


@pytest.fixture
def made(sqlite_template: Path, file: Path) -> Path:
    """A backup of a SQLite ledger."""
    back_up(f"sqlite:///{sqlite_template}", file)
    return file


def test_a_damaged_backup_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    whole = made.read_bytes()
    new = tmp_path / "new.db"
    for place in (200, len(whole) // 2, whole.index(b'"taken_at"')):
        made.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InvalidValue, match=r"damaged|no backup"):
            restored(made, f"sqlite:///{new}")
    for end in (0, 100, len(whole) - 100):
        made.write_bytes(whole[:end])
        with pytest.raises(InvalidValue, match=r"not a complete backup of a ledger|cannot read"):
            restored(made, f"sqlite:///{new}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backups"]


def test_a_copy_that_is_not_the_one_that_was_written_is_refused(made: Path, tmp_path: Path) -> None:
    with BackupFile(made) as opened:
        copy = bytearray(b"".join(opened.chunks()))
    copy[5000] ^= 1
    said = json.loads(zipfile.ZipFile(made).read("manifest.json"))
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(said["copy"], bytes(copy))  # with a checksum of ZIP's that is right
        archive.writestr("manifest.json", json.dumps(said))
    with pytest.raises(InvalidValue, match="damaged"):
        restored(made, f"sqlite:///{tmp_path}/new.db")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"kind": "postgresql"}, InvalidValue, "of a ledger on postgresql, the database is sqlite"),
        ({"format": 2}, InvalidValue, "restore it with that release"),
        ({"revision": "9999", "runs_from": "9999"}, SchemaMismatch, "restore it with that release"),
    ],
)
def test_a_backup_that_does_not_fit_is_refused(
    made: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    change_manifest(made, **changes)
    with pytest.raises(error, match=says):
        restored(made, f"sqlite:///{tmp_path}/new.db")
    assert not (tmp_path / "new.db").exists()


def test_a_newer_schema_that_this_release_runs_on_is_restored_as_it_is(made: Path, tmp_path: Path) -> None:
    change_manifest(made, revision="9999", runs_from=revisions()[-1])
    restored(made, f"sqlite:///{tmp_path}/new.db")
    with closing(Database(f"sqlite:///{tmp_path}/new.db")) as database, database.snapshot() as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one() == "9999"


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_what_is_left_of_a_lost_file_is_never_mixed_with_the_new_one(made: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"ledger.db{suffix}").write_bytes(b"old")
    with pytest.raises(Conflict, match="move ledger"):
        restored(made, f"sqlite:///{tmp_path}/ledger.db")


def test_a_restored_file_is_its_owners_alone(made: Path, tmp_path: Path) -> None:
    restored(made, f"sqlite:///{tmp_path}/ledger.db")
    assert stat.S_IMODE((tmp_path / "ledger.db").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backups", "ledger.db"]


# PostgreSQL's programs, as stand-ins.

URL = sa.make_url("postgresql+psycopg://ledger:hunter22@127.0.0.1:1/books?sslmode=disable")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def program(name: str, script: str) -> None:
        (folder / name).write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{name} (PostgreSQL) 16.4" && exit\n{script}'
        )
        (folder / name).chmod(0o755)

    return program


def dump(server: str = "16.4") -> bytes:
    return b"".join(postgres_tools.dump(URL, server, schema="public", snapshot="1"))


def test_a_password_is_in_no_command_line_and_no_error(program: Callable[[str, str], None]) -> None:
    program("pg_dump", 'echo "$@" "$PGPASSWORD"')
    arguments, password = dump().decode().strip().rsplit(" ", 1)
    assert password == "hunter22"
    assert "hunter22" not in arguments
    assert "user=ledger" in arguments
    assert "sslmode=disable" in arguments
    program("pg_dump", 'echo "pg_dump: error: no way with $PGPASSWORD" >&2; exit 1')
    with pytest.raises(LedgerError, match=r"^pg_dump failed: pg_dump: error: no way with …$"):
        dump()
    program("pg_restore", 'echo "pg_restore: error: table exists" >&2; exit 1')
    with pytest.raises(LedgerError, match=r"pg_restore failed: .*table exists"):
        postgres_tools.load(URL, "16.4", schema="public", chunks=[b"x" * 2**20] * 4)


def test_programs_that_are_missing_or_older_than_the_server_are_named(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("pg_dump", "")
    with pytest.raises(ToolMissing, match=r"has version 16, but the server has 17: .*postgresql-client-17"):
        dump("17.1 (Debian 17.1-1)")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissing, match=r"pg_dump is not on PATH: .*postgresql-client-16"):
        dump()
