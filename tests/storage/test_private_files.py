"""Nobody but its owner reads what the service writes, whatever the umask of the process is."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from serve_app.accounting.archive import archive_months
from serve_app.accounting.database import Database
from serve_app.settings import ConsoleArgs, GatewayArgs
from serve_app.storage.private_files import is_open_to_others
from serve_app.storage.request_log import RequestLog
from serve_app.storage.spool import Spool
from serve_app.storage.spool_file import SpoolFile

NOVEMBER = 1_795_000_000.0  # 2026


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_state_folders_are_closed(tmp_path: Path) -> None:
    GatewayArgs(home=tmp_path / "gateway").state_dir()
    ConsoleArgs(home=tmp_path / "console").state_dir()
    assert modes(tmp_path) == {"gateway": 0o700, "console": 0o700}


def test_spools_and_request_logs_are_closed(tmp_path: Path) -> None:
    Spool(tmp_path / "spool", "one")
    file = SpoolFile.open_locked(tmp_path / "spool" / "two.spool", create=True, flushed=False)
    assert file is not None
    file.set_aside([b"refused"])
    log = RequestLog(tmp_path, "gateway")
    log.write({"request_id": "chatcmpl-1"})
    log.close()
    assert modes(tmp_path) == {
        "spool": 0o700,
        "spool/one.spool": 0o600,
        "spool/two.spool": 0o600,
        "spool/two.spool.refused": 0o600,
        "logs": 0o700,
        "logs/gateway.jsonl": 0o600,
    }


def test_a_ledger_its_logs_and_its_archives_are_closed(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    with closing(Database(f"sqlite:///{ledger}")) as database:
        database.migrate()
        with database.transaction() as transaction:
            transaction.next_entry()
        archive_months(database, "2026-10", tmp_path / "archive", NOVEMBER, lambda _: None)
        found = modes(tmp_path)
    assert {name: mode for name, mode in found.items() if name.startswith("ledger")} == {
        "ledger.db": 0o600,
        "ledger.db-wal": 0o600,
        "ledger.db-shm": 0o600,
    }
    assert found["archive"] == 0o700


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_file_is_open_where_its_mode_and_all_folders_above_it_let_others_in(shared: Path) -> None:
    home = shared / "home"
    home.mkdir(mode=0o711)
    (home / "file").touch()
    (shared / "link").symlink_to(home / "file")
    assert is_open_to_others(home / "file")
    assert is_open_to_others(shared / "link")
    home.chmod(0o700)
    assert not is_open_to_others(home / "file")
    assert not is_open_to_others(shared / "link")
    home.chmod(0o755)
    (home / "file").chmod(0o600)
    assert not is_open_to_others(home / "file")
    with pytest.raises(FileNotFoundError):
        is_open_to_others(home / "none")
