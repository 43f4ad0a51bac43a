"""A PostgreSQL that hangs, resets or is slow: every call ends in time, and nothing is lost or billed twice."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.accounting.database import Database
from serve_app.contracts.books import Settled
from serve_app.contracts.commands import ListUsage, SumUsage
from serve_app.contracts.errors import LedgerUnavailable

from .books import COST, Books, Ledger
from .proxy import Proxy, proxy_of

TIMEOUT_S = 1.5
SOON_S = 8.0  # far above what a call may take, and far below the quarter of an hour that it took without bounds


class Away:
    """A ledger behind a proxy, called from threads so that a call that hangs fails the test and not the run."""

    def __init__(self, proxy: Proxy, url: sa.URL, direct: str) -> None:
        self.proxy = proxy
        self.direct = direct
        self.ledger = Ledger(url, wait_s=TIMEOUT_S / 2, timeout_s=TIMEOUT_S)
        self.books = Books(self.ledger)
        self._threads = ThreadPoolExecutor(4)

    def soon(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._threads.submit(function, *arguments).result(SOON_S)

    def settle(self, request_id: str) -> Settled:
        (answer,) = self.soon(self.ledger.settle, [self.books.settlement(request_id)])
        assert isinstance(answer, Settled)
        return answer

    def settle_at_last(self, request_id: str) -> Settled:
        """Repeats as gateways do."""
        until = time.monotonic() + SOON_S
        while True:
            try:
                return self.settle(request_id)
            except LedgerUnavailable:
                assert time.monotonic() < until

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
    with Ledger(away.direct) as ledger:
        assert ledger.account_totals(away.books.account_id).requests == requests
        assert ledger.get_account(away.books.account_id).balance == 10**12 - requests * COST
        assert ledger.check().ok


def test_a_call_to_a_silent_database_ends_and_the_next_one_uses_a_new_connection(away: Away) -> None:
    away.settle("before")
    away.proxy.fall_silent()
    with pytest.raises(LedgerUnavailable):
        away.settle("r")
    away.proxy.pass_new_connections()
    assert not away.settle("r").duplicate
    assert_billed(away, 2)


def test_a_step_of_a_check_ends_too_and_counts_as_under_way(away: Away) -> None:
    database = away.ledger._database

    def step() -> None:
        with database.aside() as connection:
            assert database._under_way
            away.proxy.fall_silent()
            connection.execute(sa.text("SELECT 1"))

    with pytest.raises(LedgerUnavailable):
        away.soon(step)
    assert not database._under_way


def test_new_connections_that_get_no_answer_end_too(away: Away) -> None:
    away.proxy.fall_silent()
    for _ in range(2):  # the first finds its connection dead, the second gets no new one
        with pytest.raises(LedgerUnavailable):
            away.settle("r")
    away.proxy.recover()
    assert not away.settle("r").duplicate
    assert_billed(away, 1)


def test_a_silence_in_mid_transaction_does_not_keep_the_ledger_locked(away: Away) -> None:
    def silent_inside() -> None:
        with away.ledger._database.transaction() as transaction:
            transaction.next_version()
            away.proxy.fall_silent()

    with pytest.raises(LedgerUnavailable):
        away.soon(silent_inside)
    away.proxy.pass_new_connections()
    away.settle_at_last("r")  # the server has kept the head's lock until it ended that session
    assert_billed(away, 1)


def test_a_session_that_was_cut_within_a_message_does_not_keep_the_ledger_locked(away: Away) -> None:
    def cut() -> None:
        with away.ledger._database.transaction() as transaction:
            driver: Any = transaction.connection.connection.driver_connection
            with driver.pipeline():
                driver.execute("SELECT 1")  # without the Sync that ends a message: no time limit of the server's runs
                wait_until_read(away.direct)
                away.proxy.fall_silent()

    with pytest.raises(LedgerUnavailable):
        away.soon(cut)
    away.proxy.pass_new_connections()
    away.settle_at_last("r")
    assert_billed(away, 1)


def wait_until_read(direct: str) -> None:
    """Until the server has read what the ledger's session has sent, and waits for more in mid-message."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND wait_event = 'ClientRead' "
        "AND query = 'SELECT 1' AND datname = current_database()"
    )
    with psycopg.connect(direct.replace("+psycopg", ""), autocommit=True) as connection:
        until = time.monotonic() + SOON_S
        while connection.execute(waits).fetchone() != (1,):
            assert time.monotonic() < until


def test_a_commit_that_arrives_long_after_its_caller_gave_up_bills_once(away: Away) -> None:
    sa.event.listen(away.ledger._database.engine, "commit", lambda _: away.proxy.fall_silent())
    with pytest.raises(LedgerUnavailable):
        away.settle("r")
    away.proxy.recover()
    with Ledger(away.direct) as ledger:
        (answer,) = ledger.settle([away.books.settlement("r")])
    assert isinstance(answer, Settled)
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
        database = Database(url, wait_s=4, timeout_s=10)
        with database.engine.connect() as connection:
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
            "lock_timeout": "4s",
            "statement_timeout": "8s",
            "idle_in_transaction_session_timeout": "10s",
        }
        assert idle + interval * count <= 10
        assert most_ms <= 10_000
        database.close()

        database = Database(url.update_query_dict({"keepalives_idle": "77"}))
        with database.engine.connect() as connection:
            driver = connection.connection.driver_connection
            with socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        database.close()


def test_a_long_read_has_bounds_of_its_own(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.accounting import ledger as ledgers

    def slow(connection: sa.Connection, _command: Any, _now: float) -> str:
        connection.exec_driver_sql("SELECT pg_sleep(0.6)")
        time.sleep(0.6)  # as long as one session may be idle otherwise
        connection.exec_driver_sql("SELECT 1")
        return "read"

    monkeypatch.setitem(ledgers.READS, ListUsage, slow)
    monkeypatch.setitem(ledgers.READS, SumUsage, slow)
    monkeypatch.delitem(ledgers.LONG_READS, SumUsage)
    with Ledger(on_postgres, timeout_s=0.5) as ledger:
        with pytest.raises(LedgerUnavailable):
            ledger.run(SumUsage())
        assert ledger.run(ListUsage()) == "read"


def test_a_call_that_outlives_its_bounds_is_reported(url: str) -> None:
    database = Database(url)
    with database.snapshot(timeout_s=30.0):
        assert database.overdue_s() == 0
        with contextlib.suppress(LedgerUnavailable), database.snapshot(timeout_s=0.5):  # PostgreSQL ends it by then
            time.sleep(0.6)
            assert database.overdue_s() > 0
    assert database.overdue_s() == 0
    database.close()
