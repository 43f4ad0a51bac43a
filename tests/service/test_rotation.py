"""Every secret that can be rotated is, under load: the clients' SDKs see no error, and the books add up.

The processes with the new operator key, the new secret key and the new log-in to the database start beside those with
the old ones; beside these, then, processes that know the new secret key alone.
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

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

MONEY = 10**12  # nano-units
# The server of this test asks nobody for a password: tests/accounting/test_database_password.py is about these.
ADD_LOGIN = "CREATE ROLE ledger_b LOGIN IN ROLE postgres; ALTER ROLE ledger_b SET role = 'postgres'"


def status(stand: Stand, key: str, path: str = "/admin/accounts") -> int:
    """Returns the status of a request with this key.

    The key is an operator's, or a client's for `/models`, which needs no limiter's lease.
    """
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{stand.base_url}{path}", headers=headers, trust_env=False, timeout=300).status_code


def operator_key(stand: Stand) -> str:
    return (stand.home / "secrets" / "operator-key").read_text().strip()


def connected(stand: Stand) -> psycopg.Connection:
    return psycopg.connect(make_url(stand.database_url).set(drivername="postgresql").render_as_string())


def add_login(stand: Stand) -> None:
    with connected(stand) as connection:
        connection.execute(ADD_LOGIN)


def logins(stand: Stand) -> set[str]:
    """Returns the users that have sessions in the database."""
    with connected(stand) as connection:
        rows = connection.execute("SELECT DISTINCT usename FROM pg_stat_activity WHERE usename IS NOT NULL")
        return {name for (name,) in rows}


async def test_each_secret_is_rotated_without_a_rejected_request() -> None:
    shape = Shape("postgresql", stub=True)
    with Stand(shape) as old:
        customer = await asyncio.to_thread(Customer, old, "with the SDK", MONEY)
        idle = await asyncio.to_thread(Customer, old, "with a key that is not used", MONEY)
        clients = Clients(old, customer)
        await asyncio.to_thread(add_login, old)
        new_secrets = {"operator_key": secrets.token_urlsafe(32), "secret_key": secrets.token_urlsafe(32)}
        new = Stand(shape, beside=old, login="ledger_b", **new_secrets)
        last = Stand(shape, beside=new, previous_secret_key="")

        async def move(running: Session, stand: Stand) -> None:
            running.load.move(stand.base_url)
            clients.move(stand)
            await clients.more()
            await running.more(20)

        async def rotate(running: Session) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                await asyncio.to_thread(new.__enter__)
                key, _ = await asyncio.to_thread(customer.new_key)  # by the old service
                await move(running, new)
                clients.change_key(key)
                await clients.more()  # those with the old key have ended
                await asyncio.to_thread(new.admin, "DELETE", f"/admin/keys/{customer.key_id}")
                assert await asyncio.to_thread(logins, old) == {"postgres", "ledger_b"}
                assert [await asyncio.to_thread(status, stand, key, "/models") for stand in (old, new)] == [200, 200]
                await asyncio.to_thread(last.__enter__)
                await move(running, last)
                statuses = [await asyncio.to_thread(status, stand, idle.key, "/models") for stand in (last, old)]
                assert statuses == [200, 200]
                clients.end()
            former = operator_key(old)
            assert [status(new, operator_key(new)), status(new, former)] == [200, 200]
            assert [status(old, operator_key(new)), status(old, former)] == [401, 200]

        try:
            report = await session.run(
                old, rotate, mode="rotation", seed=9, clients=session.CUSTOMERS, credit=MONEY, top_up=0
            )
        finally:
            await asyncio.to_thread(last.stop)
            await asyncio.to_thread(new.stop)
        old.keep = bool(report.problems or clients.failures)
    assert clients.failures == []
    assert report.problems == [], report.text()
