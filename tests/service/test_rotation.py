"""Every secret that can be rotated is, under load: the clients' SDKs see no error, and the books add up.

The processes with the new operator key and the new log-in to the database start beside those with the old ones.
"""

from __future__ import annotations

import asyncio
import secrets

import httpx
import psycopg
import pytest
from sqlalchemy import make_url

from tests.service.chaos import session
from tests.service.chaos.session import Session
from tests.service.chaos.stand import Customer, Shape, Stand
from tests.service.sdk_clients import Clients

pytestmark = [pytest.mark.service, pytest.mark.slow]

STAY_S = 12.0
MONEY = 10**12  # nano-units
# The server of this test asks nobody for a password: tests/accounting/test_database_password.py is about these.
ADD_LOGIN = "CREATE ROLE ledger_b LOGIN IN ROLE postgres; ALTER ROLE ledger_b SET role = 'postgres'"


def status(stand: Stand, key: str) -> int:
    """Of an operator's request with this key."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{stand.base_url}/admin/accounts", headers=headers, trust_env=False, timeout=30).status_code


def operator_key(stand: Stand) -> str:
    return (stand.home / "secrets" / "operator-key").read_text().strip()


def connected(stand: Stand) -> psycopg.Connection:
    return psycopg.connect(make_url(stand.database_url).set(drivername="postgresql").render_as_string())


def add_login(stand: Stand) -> None:
    with connected(stand) as connection:
        connection.execute(ADD_LOGIN)


def logins(stand: Stand) -> set[str]:
    """Whose sessions the database has."""
    with connected(stand) as connection:
        rows = connection.execute("SELECT DISTINCT usename FROM pg_stat_activity WHERE usename IS NOT NULL")
        return {name for (name,) in rows}


async def test_operator_key_api_key_and_login_are_rotated_without_a_rejected_request() -> None:
    shape = Shape("postgresql", stub=True)
    with Stand(shape) as old:
        customer = await asyncio.to_thread(Customer, old, "with the SDK", MONEY)
        clients = Clients(old, customer)
        await asyncio.to_thread(add_login, old)
        new = Stand(shape, beside=old, login="ledger_b", operator_key=secrets.token_urlsafe(32))

        async def rotate(running: Session) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                await asyncio.to_thread(new.__enter__)
                running.load.move(new.base_url)
                clients.move(new)
                key, _ = await asyncio.to_thread(customer.new_key)  # by the old service, whose load has gone
                await asyncio.sleep(STAY_S)
                clients.change_key(key)
                await asyncio.sleep(STAY_S / 4)  # longer than a request and its retries take
                await asyncio.to_thread(new.admin, "DELETE", f"/admin/keys/{customer.key_id}")
                before = clients.complete
                await asyncio.sleep(STAY_S / 2)
                assert clients.complete > before
                clients.end()
            assert await asyncio.to_thread(logins, old) == {"postgres", "ledger_b"}
            former = operator_key(old)
            assert [status(new, operator_key(new)), status(new, former)] == [200, 200]
            assert [status(old, operator_key(new)), status(old, former)] == [401, 200]

        try:
            report = await session.run(old, rotate, mode="rotation", seed=9, clients=4, credit=MONEY, top_up=0)
        finally:
            await asyncio.to_thread(new.stop)
        old.keep = bool(report.problems or clients.failures)
    assert clients.failures == []
    assert report.problems == [], report.text()
