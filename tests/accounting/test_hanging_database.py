"""A PostgreSQL that hangs, resets or is slow: every call ends in time, and nothing is lost or billed twice."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.accounting import database
from serve_app.accounting.database import Database
from serve_app.accounting.registry import READS, Reading
from serve_app.contracts.books import Settled
from serve_app.contracts.commands import ListUsage, SumUsage
from serve_app.contracts.errors import LedgerUnavailable

from .books import COST, Books, Ledger
from .proxy import Proxy, proxy_of

HURRY_S = 0.2  # the bound of a call that gets no answer; the others are patient
HANGS_S = 120.0  # then a call has no bound


class Away:
    """A ledger behind a proxy, called from threads so that a call that hangs fails the test and not the run."""

    def __init__(self, proxy: Proxy, url: sa.URL, direct: str) -> None:
        self.proxy = proxy
        self.direct = direct
        self.ledger = Ledger(url)
        self.books = Books(self.ledger)
        self._threads = ThreadPoolExecutor(4)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._threads.submit(function, *arguments).result(HANGS_S)

    def settle(self, request_id: str) -> Settled:
        (answer,) = self.call(self.ledger.settle, [self.books.settlement(request_id)])
        assert isinstance(answer, Settled)
        return answer

    @contextmanager
    def in_a_hurry(self) -> Iterator[None]:
        """Calls that begin in it end soon."""
        ledger_database: Any = self.ledger._database
        patient_s = ledger_database._timeout_s
        ledger_database._timeout_s = HURRY_S
        yield
        ledger_database._timeout_s = patient_s

    def fall_silent(self) -> None:
        """The database answers no more, and the call of this thread that is under way ends soon."""
        self.proxy.fall_silent()
        database._ends_at.set(time.monotonic() + HURRY_S)

    def close(self) -> None:
        self.proxy.reset()  # what still hangs
        self._threads.shutdown(wait=False)
        self.ledger.close()


@pytest.fixture
def away(on_postgres: str) -> Iterator[Away]:
    with proxy_of(on_postgres) as (proxy, url):
        opened = Away(proxy, url, on_postgres)
        yield opened
        opened.close()


def assert_billed(away: Away, requests: int) -> None:
    with Ledger(away.direct) as direct:
        assert direct.account_totals(away.books.account_id).requests == requests
        assert direct.get_account(away.books.account_id).balance == 10**12 - requests * COST
        assert direct.check().ok


def test_a_call_to_a_silent_database_ends_and_the_next_one_uses_a_new_connection(away: Away) -> None:
    away.settle("before")
    away.proxy.fall_silent()
    with away.in_a_hurry(), pytest.raises(LedgerUnavailable):
        away.settle("r")
    away.proxy.pass_new_connections()
    assert not away.settle("r").duplicate
    assert_billed(away, 2)


def test_a_step_of_a_check_ends_too_and_counts_as_under_way(away: Away) -> None:
    under_way = away.ledger._database._under_way

    def step() -> None:
        with away.ledger._database.aside() as connection:
            assert under_way
            away.fall_silent()
            connection.execute(sa.text("SELECT 1"))

    with pytest.raises(LedgerUnavailable):
        away.call(step)
    assert not under_way


def test_new_connections_that_get_no_answer_end_too(away: Away) -> None:
    away.proxy.fall_silent()
    for _ in range(2):  # the first finds its connection dead, the second gets no new one
        with away.in_a_hurry(), pytest.raises(LedgerUnavailable):
            away.settle("r")
    away.proxy.recover()
    assert not away.settle("r").duplicate
    assert_billed(away, 1)


def test_a_silence_in_mid_transaction_does_not_keep_the_ledger_locked(away: Away) -> None:
    def silent_inside() -> None:
        with away.ledger._database.transaction() as transaction:
            transaction.next_version()
            away.fall_silent()

    with pytest.raises(LedgerUnavailable):
        away.call(silent_inside)
    away.proxy.pass_new_connections()
    away.settle("r")
    assert_billed(away, 1)


def test_a_session_that_was_cut_within_a_message_does_not_keep_the_ledger_locked(away: Away) -> None:
    def cut() -> None:
        with away.ledger._database.transaction() as transaction:
            driver: Any = transaction.connection.connection.driver_connection
            with driver.pipeline():
                driver.execute("SELECT 1")  # without the Sync that ends a message: no time limit of the server's runs
                wait_until_read(away.direct)
                away.fall_silent()

    with pytest.raises(LedgerUnavailable):
        away.call(cut)
    away.proxy.pass_new_connections()
    away.settle("r")
    assert_billed(away, 1)


def wait_until_read(direct: str) -> None:
    """Until the server has read what the ledger's session has sent, and waits for more in mid-message."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND wait_event = 'ClientRead' "
        "AND query = 'SELECT 1' AND datname = current_database()"
    )
    with psycopg.connect(direct.replace("+psycopg", ""), autocommit=True) as connection:
        until = time.monotonic() + 60
        while connection.execute(waits).fetchone() != (1,):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_commit_that_arrives_long_after_its_caller_gave_up_bills_once(away: Away) -> None:
    sa.event.listen(away.ledger._database.engine, "commit", lambda _: away.fall_silent())
    with pytest.raises(LedgerUnavailable):
        away.settle("r")
    away.proxy.recover()
    with Ledger(away.direct) as direct:
        (answer,) = direct.settle([away.books.settlement("r")])
    assert isinstance(answer, Settled)
    assert answer.duplicate
    assert_billed(away, 1)


def test_a_reset_costs_one_try(away: Away) -> None:
    away.settle("before")
    away.proxy.reset()
    with pytest.raises(LedgerUnavailable):
        away.settle("r")
    away.proxy.recover()
    assert not away.settle("r").duplicate
    assert_billed(away, 2)


def test_a_slow_network_is_no_outage(away: Away) -> None:
    away.proxy.delay_s = 0.01
    away.settle("r")
    assert_billed(away, 1)


def test_connections_notice_a_vanished_machine_and_their_server_a_vanished_client(on_postgres: str) -> None:
    with proxy_of(on_postgres) as (_, url):
        opened = Database(url, wait_s=40, timeout_s=100)
        with opened.engine.connect() as connection:
            shown = {
                name: connection.exec_driver_sql(f"SHOW {name}").scalar()
                for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
            }
            driver: Any = connection.connection.driver_connection
            with socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle, interval, count, most_ms = (
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                )
        assert shown == {
            "lock_timeout": "40s",
            "statement_timeout": "80s",
            "idle_in_transaction_session_timeout": "100s",
        }
        assert idle + interval * count <= 100
        assert most_ms <= 100_000
        opened.close()

        opened = Database(url.update_query_dict({"keepalives_idle": "77"}))
        with opened.engine.connect() as connection:
            driver = connection.connection.driver_connection
            with socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        opened.close()


def test_a_long_read_has_bounds_of_its_own(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bounds(connection: sa.Connection, _command: Any, _now: float) -> list[Any]:
        names = ("statement_timeout", "idle_in_transaction_session_timeout")
        of_server = [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names]
        return [*of_server, database._ends_at.get() - time.monotonic() > 50]

    monkeypatch.setitem(READS, ListUsage, Reading(bounds, timeout_s=7200.0))
    monkeypatch.setitem(READS, SumUsage, Reading(bounds, timeout_s=None))
    with Ledger(on_postgres, timeout_s=50) as opened:
        assert opened.run(SumUsage()) == ["40s", "50s", False]
        assert opened.run(ListUsage()) == ["2h", "2h", True]
        assert opened.run(SumUsage()) == ["40s", "50s", False]


def test_a_call_that_outlives_its_bounds_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Database(f"sqlite:///{tmp_path}/ledger.db")
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(database, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    with opened.snapshot(timeout_s=30.0):
        assert opened.overdue_s() == 0
        with opened.snapshot(timeout_s=5.0):
            clock.now += 6
            assert opened.overdue_s() == 1
        assert opened.overdue_s() == 0
    assert opened.overdue_s() == 0
    opened.close()
