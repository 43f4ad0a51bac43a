"""The guides for which the ledger, the database or the secrets are replaced."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from secrets import token_urlsafe
from typing import Any

import pytest

from serve_app.contracts import commands
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.storage.spool import Spool
from tests.accounting.books import COST, Books, Ledger, settlement
from tests.service.harness import nano, until
from tests.service.operating import postgres
from tests.service.operating.document import Command
from tests.service.operating.operator import Operator
from tests.service.operating.stage import Done, Step


def lose_and_restore(operator: Operator, section: Sequence[Command], start: Command) -> None:
    """The whole state folder is lost but for what the document says to keep apart."""
    kept: dict[str, Any] = {}

    def lose() -> None:
        kept.update(operator.account())
        spool = Spool(operator.home / "spool", "gateway-last")
        spool.append(settlement("not settled", operator.account_id, operator.key_id, finished_at=time.time()))
        operator.stop()
        spool.close()
        for name in ("spool", "secrets/secret-key"):
            (operator.folder / "kept" / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (operator.home / name).rename(operator.folder / "kept" / name)
        shutil.rmtree(operator.home)
        operator.new_home()
        shutil.copytree(operator.folder / "kept", operator.home, dirs_exist_ok=True)

    def other_server() -> None:
        """A ledger on PostgreSQL, and its backup."""
        operator.server = postgres.Server(operator.folder / "data")
        operator.server.set_up()
        operator.more |= {"PGHOST": operator.server.host, "PGPASSWORD": postgres.PASSWORD}
        url = f"postgresql+psycopg://ledger:{postgres.PASSWORD}@/serve_app?host={operator.server.host}"
        with contextlib.closing(Ledger(url, currency="USD")) as ledger:
            books = operator.past = Books(ledger)
            ledger.settle([books.settlement("before the base")])
        address = "postgresql+psycopg://ledger@db.example.com/serve_app"
        operator.shell(f"serve-app ledger backup --to ledger.backup --database {address}")
        operator.more["PGUSER"] = "postgres"

    def filled(done: Done) -> None:
        assert re.search(r"^books +ok$", done.out, re.MULTILINE)

    def start_anew() -> None:
        operator.take_stub()
        operator.run_one(start, Step())

    def goes_on(_: Done) -> None:
        until(lambda: operator.account()["usage"]["requests"] == kept["usage"]["requests"] + 1)
        assert nano(operator.account()["balance"]) == nano(kept["balance"]) - COST
        assert operator.chat().is_success

    operator.run(
        section,
        {
            "serve-app ledger backup": lambda _: list((operator.folder / "backups").iterdir()),
            "serve-app ledger restore --from /srv/backups": Step(filled, lose),
            "createdb": Step(before=other_server),
            "serve-app ledger restore --from ledger.backup": filled,
            "serve-app doctor": Step(goes_on, start_anew),
        },
    )
    assert operator.shell("serve-app ledger check --full").out.startswith("ok")


def restore_to_a_moment(operator: Operator, section: Sequence[Command]) -> None:
    server, url = operator.server, "postgresql+psycopg://ledger:{}@/serve_app?host={}"
    recovered = operator.folder / "recovered"

    def archive(done: Done) -> None:
        with (server.folder / "postgresql.conf").open("a") as settings:
            settings.write(done.text)
        server.own(operator.folder / "wal")
        server.restart()

    def go_on(_: Done) -> None:
        with contextlib.closing(Ledger(url.format(postgres.PASSWORD, server.host))) as ledger:
            books = operator.past = Books.of(ledger, operator.past.account_id, operator.past.key_id)
            ledger.settle([books.settlement("in the log")])
            [(operator.moment,)] = server.run("SELECT clock_timestamp()::text")
            ledger.settle([books.settlement("after the moment")])
        server.archive_all()

    def recover(done: Done) -> None:
        operator.stop()
        server.stop()
        shutil.copytree(operator.folder / "base", recovered)
        for left in recovered.glob(".s.PGSQL*"):  # the tests' servers have their sockets there
            left.unlink()
        with (recovered / "postgresql.auto.conf").open("a") as settings:
            settings.write(done.text)
        (recovered / "recovery.signal").touch()
        recovered.chmod(0o700)
        server.own(recovered)
        operator.server = postgres.Server(recovered)
        server.remove()
        until(lambda: operator.server.run("SELECT pg_is_in_recovery()") == [(False,)], every_s=0.02)
        operator.more["PGHOST"] = operator.server.host

    operator.run(
        section,
        {"wal_level": archive, "pg_basebackup": go_on, "restore_command": recover, "serve-app ledger check": Step()},
    )
    with contextlib.closing(Ledger(url.format(postgres.PASSWORD, operator.server.host))) as ledger:
        wanted = ("before the base", "in the log", "after the moment")
        assert ledger.run(commands.FindUnsettled(wanted)) == ["after the moment"]


def rotate(operator: Operator, section: Sequence[Command]) -> None:
    """All at once, with the service anew on the recovered ledger. On one machine that needs a restart."""
    secrets = operator.home / "secrets"
    former = (secrets / "operator-key").read_text()

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return operator.service.http.get("/admin/accounts", headers=headers).status_code

    def new_operator_key(done: Done) -> None:
        (secrets / "operator-key.previous").write_text(former)
        (secrets / "operator-key").write_text(done.out)

    def restart(_: Done) -> None:
        url = f"postgresql+psycopg://ledger_b:NEW_PASSWORD@/serve_app?host={operator.server.host}"
        operator.more["SERVE_APP_DATABASE_URL"] = url
        operator.start("make serve")
        assert [status(operator.service.operator_key), status(former)] == [200, 200]
        account = operator.service.account("of the recovered ledger")
        operator.account_id, operator.key = account.id, account.key

    def closed(_: Done) -> None:
        with pytest.raises(LedgerUnavailable, match="password authentication failed"):
            Ledger(f"postgresql+psycopg://ledger:{postgres.PASSWORD}@/serve_app?host={operator.server.host}")

    def new_secret_key() -> None:
        (secrets / "secret-key.previous").write_text((secrets / "secret-key").read_text())
        (secrets / "secret-key").write_text(token_urlsafe(32))
        operator.start("make serve")

    operator.run(
        section,
        {
            "openssl": new_operator_key,
            "GRANT": restart,
            "SELECT": lambda done: done.out == "[(0,)]",
            "ALTER ROLE ledger_a PASSWORD NULL": closed,
            "serve-app secrets": Step(
                lambda done: "You can remove the previous secret key" in done.out, new_secret_key
            ),
        },
    )
    (secrets / "operator-key.previous").unlink()
    (secrets / "secret-key.previous").unlink()
    for pid in operator.service.pids("gateway:Gateway"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: operator.service.answers() and status(former) == 401)
    until(operator.is_served)
