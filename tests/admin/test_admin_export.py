"""Exports: every billed request once, exact, over pages, and never half a file that looks like a whole one."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from decimal import Decimal
from typing import Any

import httpx
import pytest

from serve_app.admin import usage
from serve_app.contracts.commands import Command, ListUsage
from serve_app.contracts.money import parse_amount
from serve_app.storage.exports import REQUEST_COLUMNS
from tests.accounting.books import settlement
from tests.gateway.answers import refused
from tests.gateway.billed import START, bill
from tests.gateway.connections import served
from tests.gateway.world import OPERATOR, World

OPERATED = {"authorization": f"Bearer {OPERATOR}"}


def rows_of(form: str, text: str) -> list[dict[str, Any]]:
    return json.loads(text) if form == "json" else list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture
def pages(world: World) -> list[int]:
    """The sizes of the pages that were read from the ledger."""
    sizes: list[int] = []
    call = world.accounting.run

    async def counted(command: Command[Any]) -> Any:
        answer = await call(command)
        if isinstance(command, ListUsage):
            sizes.append(len(answer.rows))
        return answer

    world.accounting.run = counted  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize(("form", "page", "count"), [("csv", usage.PAGE, 1001), ("json", 10, 25)])
async def test_an_export_over_pages_is_the_ledgers_sum(
    world: World,
    admin: httpx.AsyncClient,
    pages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    page: int,
    count: int,
) -> None:
    monkeypatch.setattr(usage, "PAGE", page)
    charged = await asyncio.to_thread(bill, world, count, every_s=1.0)
    answer = await admin.get("/admin/usage/export", params={"format": form})
    rows = rows_of(form, answer.text)
    assert len(rows) == len({row["request_id"] for row in rows}) == count
    assert sum(parse_amount(row["charged"]) for row in rows) == charged
    totals = world.ledger.account_totals(world.account_id)
    assert (totals.requests, totals.charged) == (count, charged)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(int(row[name]) for row in rows) == getattr(totals, name)
    assert pages == [page] * (count // page) + [count % page]


async def test_pages_of_requests_give_each_once(world: World, admin: httpx.AsyncClient) -> None:
    await asyncio.to_thread(bill, world, 25)
    seen: list[str] = []
    after: str | None = None
    while True:
        params = {"limit": "10"} | ({"after": after} if after else {})
        page = (await admin.get("/admin/usage/requests", params=params)).json()
        assert len(page["data"]) <= 10
        seen += [row["request_id"] for row in page["data"]]
        if (after := page["next"]) is None:
            break
    assert seen == [f"{world.account_id}-{number:05}" for number in range(25)]


async def test_a_row_has_all_that_a_bill_is_checked_with(world: World, admin: httpx.AsyncClient) -> None:
    await asyncio.to_thread(bill, world, 1, prompt_tokens=10, cached_tokens=2, completion_tokens=4)
    [row] = (await admin.get("/admin/usage/export", params={"format": "json"})).json()
    assert tuple(row) == REQUEST_COLUMNS
    assert (row["started_at"], row["finished_at"]) == ("2026-10-31T23:59:58.500Z", "2026-11-01T00:00:00.000Z")
    assert (row["charged"], row["uncollected"], row["outcome"]) == ("0.000000046", "0.00", "completed")
    full = (
        (row["prompt_tokens"] - row["cached_tokens"]) * Decimal(row["price_input"])
        + row["cached_tokens"] * Decimal(row["price_cached_input"])
        + row["completion_tokens"] * Decimal(row["price_output"])
    ) / 10**6
    assert Decimal(row["charged"]) == full


async def test_days_are_utc_and_both_included_and_agree_with_the_sums(world: World, admin: httpx.AsyncClient) -> None:
    await asyncio.to_thread(bill, world, 96, every_s=3600.0)  # the first four days of November, an hour apart
    for first, last in (("2026-11-02", "2026-11-03"), ("2026-11-01", "2026-11-01"), ("2026-11-04", "2026-11-30")):
        period = {"from": first, "to": last}
        rows = (await admin.get("/admin/usage/export", params={"format": "json", **period})).json()
        [summed] = (await admin.get("/admin/usage", params={"group_by": "account", **period})).json()["data"]
        assert len(rows) == summed["requests"]
        assert sum(Decimal(row["charged"]) for row in rows) == Decimal(summed["charged"])
    at = {"from": "2026-11-01T01:00:00Z", "to": "2026-11-01T05:00:00+01:00"}
    rows = (await admin.get("/admin/usage/export", params={"format": "json", **at})).json()
    assert [row["finished_at"][11:13] for row in rows] == ["01", "02", "03"]


async def test_an_export_can_be_of_one_account_key_or_model(world: World, admin: httpx.AsyncClient) -> None:
    other, _ = world.new_account()
    await asyncio.to_thread(bill, world, 3)
    await asyncio.to_thread(bill, world, 5, account_id=other)
    await asyncio.to_thread(bill, world, 2, account_id=other, first=5, model="svc-coder")
    [key] = world.ledger.list_keys(other)
    for params, count in (
        ({}, 10), ({"account": other}, 7), ({"key": key.key_id}, 7), ({"model": "svc-coder"}, 2),
        ({"account": other, "model": "svc-chat"}, 5), ({"account": "acct_none"}, 0),
    ):  # fmt: skip
        rows = (await admin.get("/admin/usage/export", params={"format": "json", **params})).json()
        assert len(rows) == count, params


@pytest.mark.parametrize(("form", "empty"), [("json", "[]\n"), ("csv", ",".join(REQUEST_COLUMNS) + "\r\n")])
async def test_an_export_of_nothing_is_a_complete_file(admin: httpx.AsyncClient, form: str, empty: str) -> None:
    assert (await admin.get("/admin/usage/export", params={"format": form})).text == empty


WRONG: list[tuple[dict[str, str], str]] = [
    ({"format": "xlsx"}, "format: Input should be 'csv' or 'json', not 'xlsx'"),
    ({"from": "2026-13-01"}, "from"),
    ({"to": "yesterday"}, "to"),
    ({"from": "2026-11-30T12:00:00"}, "offset"),
    ({"from": "2026-11-02", "to": "2026-11-01"}, "before"),
    ({"from": ""}, "from"),
]


async def test_a_wrong_query_is_refused_before_the_file_begins(admin: httpx.AsyncClient) -> None:
    for params, says in WRONG:
        refused(await admin.get("/admin/usage/export", params=params), 422, says)


async def test_bad_pages_of_requests_are_422(admin: httpx.AsyncClient) -> None:
    for params in ({"after": "x"}, {"limit": "0"}, {"limit": "1001"}, {"limit": "x"}):
        refused(await admin.get("/admin/usage/requests", params=params), 422)


async def test_with_the_ledger_away_an_export_does_not_begin(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.patience_s = 0.1
    world.accounting.wire_call.down("ListUsage")
    refused(await admin.get("/admin/usage/export"), 503, "ledger")


@pytest.mark.parametrize("form", ["csv", "json"])
async def test_a_ledger_that_goes_away_in_the_middle_cuts_the_file(
    world: World, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(usage, "PAGE", 10)
    await asyncio.to_thread(bill, world, 25)
    call, pages = world.accounting.run, 0

    async def once(command: Command[Any]) -> Any:
        nonlocal pages
        if isinstance(command, ListUsage):
            pages += 1
            if pages == 2:
                raise TimeoutError  # as at the end of the patience with a ledger that is away
        return await call(command)

    world.accounting.run = once  # type: ignore[method-assign]
    async with served(world) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/admin/usage/export", params={"format": form}, headers=OPERATED)


async def test_an_export_ends_when_the_client_disconnects(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PAGE", 1)
    await asyncio.to_thread(bill, world, 20)
    call, gone, asked = world.accounting.run, asyncio.Event(), 0

    async def counted(command: Command[Any]) -> Any:
        nonlocal asked
        asked += isinstance(command, ListUsage)
        if asked == 3:
            gone.set()
            await asyncio.Event().wait()  # only being cancelled ends this
        return await call(command)

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    world.accounting.run = counted  # type: ignore[method-assign]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/admin/usage/export",
        "raw_path": b"/admin/usage/export",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {OPERATOR}".encode())],
    }
    async with asyncio.timeout(30):
        await world.app()(scope, receive, send)
    assert asked == 3


async def test_a_cell_can_not_become_a_formula(world: World, admin: httpx.AsyncClient) -> None:
    [key] = world.ledger.list_keys(world.account_id)
    evil = ["=1+1", "+1", "-1+1", "@SUM(A1)", "=cmd|' /C calc'!A0"]
    world.ledger.settle([settlement(name, world.account_id, key.key_id, finished_at=START) for name in evil])
    rows = rows_of("csv", (await admin.get("/admin/usage/export")).text)
    assert sorted(row["request_id"] for row in rows) == sorted(f"'{name}" for name in evil)
    rows = (await admin.get("/admin/usage/export", params={"format": "json"})).json()
    assert sorted(row["request_id"] for row in rows) == sorted(evil)
