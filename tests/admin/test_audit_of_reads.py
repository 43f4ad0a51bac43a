"""Reads of personal data, failed log-ins of operators and new prices are on the audit log, in bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from serve_app.admin.auditing import MAX_ADDRESSES, OTHERS, FailedLogins, record_prices
from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command, RecordAudit, RecordPrices
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.money import Price
from tests.gateway.world import World


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("path", "params", "action", "of_account"),
    [
        ("/admin/accounts/{account}/keys", {}, "read_keys", True),
        ("/admin/usage/requests", {"account": "{account}"}, "read_usage", True),
        ("/admin/accounts/{account}/statements/2026-11", {}, "read_statement", True),
        ("/admin/requests", {"account": "{account}"}, "read_usage", True),
        ("/admin/usage/export", {"from": "2026-11-01", "to": "2026-11-30"}, "export_usage", False),
    ],
)
async def test_a_read_of_personal_data_leaves_a_record(
    world: World, admin: httpx.AsyncClient, path: str, params: dict[str, str], action: str, of_account: bool
) -> None:
    asked = {name: value.format(account=world.account_id) for name, value in params.items()}
    path = path.format(account=world.account_id)
    assert (await admin.get(path, params=asked, headers={"x-operator": "ada@desk"})).status_code == 200
    [record] = world.ledger.audit_log()
    assert record.action == action
    assert record.actor.startswith("ada@desk key:")
    assert (record.account_id, record.subject) == ((world.account_id,) * 2 if of_account else ("", "service"))
    assert record.address
    if action == "export_usage":
        assert record.detail["since"]
    [shown] = (await admin.get("/admin/audit")).json()["data"]
    assert shown["action"] == action
    assert world.books_balance()


async def test_a_read_that_was_refused_leaves_none(world: World, admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/admin/accounts/acct_none/keys")).status_code == 404
    assert (await admin.get("/admin/usage/export", params={"from": "yesterday"})).status_code == 422
    assert (await admin.get("/admin/usage")).status_code == 200  # sums name nobody
    assert world.ledger.audit_log() == []


async def test_wrong_operator_keys_of_an_address_share_a_record(world: World, admin: httpx.AsyncClient) -> None:
    world.authenticator.trusted_proxies = 1
    window_has_ended = asyncio.Event()
    world.admin.failed_logins = FailedLogins(world.admin.accounting, sleep=lambda _: window_has_ended.wait())

    async def attempt(address: str, authorization: str) -> None:
        headers = {"authorization": authorization, "x-forwarded-for": address}
        assert (await admin.get("/admin/accounts", headers=headers)).status_code in (401, 429)

    await asyncio.gather(*(attempt("203.0.113.9", f"Bearer guess-{number}") for number in range(30)))
    await attempt("203.0.113.10", "Bearer guess")
    await admin.get("/admin/accounts", headers={"authorization": ""})  # no key, no try
    assert world.ledger.audit_log() == []
    window_has_ended.set()
    await until(lambda: len(world.ledger.audit_log()) == 2)
    records = {record.address: record for record in world.ledger.audit_log()}
    assert records["203.0.113.9"].detail == {"tries": 30}
    assert records["203.0.113.10"].detail == {"tries": 1}
    assert {(record.action, record.actor, record.account_id) for record in records.values()} == {
        ("failed_login", "unknown", "")
    }
    assert world.ledger.check().ok


class Books:
    """Takes commands; the first `away` of them find the ledger away."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.commands: list[Command[Any]] = []

    async def run(self, command: Command[Any]) -> Any:
        self.away -= 1
        if self.away >= 0:
            raise LedgerUnavailable("away")
        self.commands.append(command)


async def test_many_addresses_cannot_fill_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.admin.auditing.RETRY_S", 0.001)
    books = Books(away=50)
    failed = FailedLogins(books, sleep=lambda _: asyncio.sleep(0))
    for number in range(10 * MAX_ADDRESSES):
        failed.count(f"10.0.{number // 256}.{number % 256}")
    await until(lambda: len(books.commands) == MAX_ADDRESSES + 1)
    tries = {one.audit.address: one.detail["tries"] for one in books.commands if isinstance(one, RecordAudit)}
    assert tries.pop(OTHERS) == 9 * MAX_ADDRESSES
    assert set(tries.values()) == {1}
    assert failed._tries == {}


async def test_new_prices_are_recorded_once_however_many_gateways_report_them(
    world: World, admin: httpx.AsyncClient
) -> None:
    old, new = Price(270, 70, 1100), Price(300, 70, 1100)
    for price in (old, old, new, new):
        prices = {"svc-chat": price, "svc-coder": old}
        await world.admin.accounting.run(RecordPrices(prices, Audit("deployment")))
    records = (await admin.get("/admin/audit")).json()["data"]
    assert [(one["action"], one["subject"], one["actor"]) for one in records] == [
        ("set_price", "svc-chat", "deployment"),
        ("set_price", "svc-coder", "deployment"),
        ("set_price", "svc-chat", "deployment"),
    ]
    assert records[0]["detail"] == {
        "input": {"was": "0.27", "is": "0.30"},
        "cached_input": {"was": "0.07", "is": "0.07"},
        "output": {"was": "1.10", "is": "1.10"},
    }
    assert records[2]["detail"]["input"] == {"was": None, "is": "0.27"}


async def test_a_gateway_reports_its_prices_when_the_ledger_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.admin.auditing.RETRY_S", 0.001)
    books, prices = Books(away=3), {"svc-chat": Price(1, 1, 1)}
    record_prices(books, prices)
    await until(lambda: books.commands == [RecordPrices(prices, Audit("deployment"))])


async def test_the_deployment_of_a_gateway_reports_the_prices_of_its_configuration() -> None:
    from deployments.gateway import Gateway

    gateway, books = MagicMock(), Books()
    gateway._ledger = books
    price = {"input": "0.27", "cached_input": "0.07", "output": "1.10"}
    config = {"models": {"svc-chat": {"backends": {"a": 1}, "price": price}}}
    await Gateway.func_or_class.reconfigure(gateway, config)
    await until(lambda: books.commands == [RecordPrices({"svc-chat": Price(270, 70, 1100)}, Audit("deployment"))])
