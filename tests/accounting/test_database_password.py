"""Two logins in turns, by the commands of docs/guides/rotate-secrets.md: no settlement fails meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from serve_app.contracts.books import Settled
from serve_app.contracts.errors import LedgerUnavailable

from .books import COST, Books, Ledger

GUIDE = (Path(__file__).parents[2] / "docs/guides/rotate-secrets.md").read_text()
[ADD_LOGIN, CLOSE] = re.findall(r"```sql\n(.*?)```", GUIDE, re.DOTALL)
LOGINS = ("ledger_a", "ledger_b")


@pytest.fixture
def server(postgres: str) -> Iterator[str]:
    """A server that asks the two log-ins for passwords, with a database of the first one."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        [path] = connection.execute("SHOW hba_file").fetchone() or ()
        trusting = Path(path).read_text()
        Path(path).write_text(f"local all {','.join(LOGINS)} scram-sha-256\n{trusting}")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("CREATE ROLE ledger_a LOGIN PASSWORD 'first'")
        connection.execute("CREATE DATABASE two_logins OWNER ledger_a")
        yield postgres
        connection.execute("DROP DATABASE two_logins WITH (FORCE)")
        for login in reversed(LOGINS):
            connection.execute(f"DROP ROLE {login}")
        Path(path).write_text(trusting)
        connection.execute("SELECT pg_reload_conf()")


def address(server: str, login: str, password: str) -> str:
    [folder] = parse_qs(urlsplit(server).query)["host"]
    return f"postgresql+psycopg://{login}:{password}@/two_logins?host={folder}"


@pytest.mark.slow
def test_a_service_moves_to_another_login_without_a_failed_settlement(server: str) -> None:
    with Ledger(address(server, "ledger_a", "first")) as old, psycopg.connect(server, autocommit=True) as administrator:
        books = Books(old)
        with pytest.raises(LedgerUnavailable, match="password authentication failed") as wrong:
            Ledger(address(server, "ledger_a", "mistaken"))
        assert "mistaken" not in str(wrong.value)
        for command in filter(None, map(str.strip, ADD_LOGIN.split(";"))):
            administrator.execute(command)
        with Ledger(address(server, "ledger_b", "NEW_PASSWORD")) as new:
            for ledger, request_id in ((old, "r1"), (new, "r2"), (old, "r3")):
                assert isinstance(ledger.settle([books.settlement(request_id)])[0], Settled)
            administrator.execute(CLOSE)
            assert isinstance(old.settle([books.settlement("r4")])[0], Settled)  # a connection that is open stays
            with pytest.raises(LedgerUnavailable, match="password authentication failed"):
                Ledger(address(server, "ledger_a", "first"))
            with new._database.snapshot() as connection:
                # As the service ends what it has given up: sessions of both log-ins.
                query = "SELECT bool_and(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'ledger_a'"
                assert connection.exec_driver_sql(query).scalar_one() is True
            assert isinstance(new.settle([books.settlement("r5")])[0], Settled)
            assert new.account_totals(books.account_id).charged == 5 * COST
            assert new.check().ok
            owners = "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'"
            with new._database.snapshot() as connection:
                assert connection.exec_driver_sql(owners).scalars().all() == ["ledger_a"]
