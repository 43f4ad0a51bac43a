"""The audit log: a record for each change that an operator makes, none for one that failed, and no secret in it."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from serve_app.admin.document import ENDPOINTS
from serve_app.contracts.books import Outcome, Refusal, Settlement, SettlementRejected
from serve_app.contracts.commands import Command
from serve_app.contracts.key_format import digest
from serve_app.contracts.money import Price
from serve_app.storage.sealing import SecretKeys
from tests.gateway.answers import refused
from tests.gateway.world import NANO, OPERATOR, SECRET, World

FINGERPRINT = f"key:{SecretKeys(SECRET).derive(OPERATOR)[:12]}"
# Each is a name, the endpoint, a body, and the actions of its records.
WRITES: list[tuple[str, str, str, dict[str, Any] | None, list[str]]] = [
    ("create_account", "POST", "/admin/accounts", {"name": "x"}, ["create_account"]),
    (
        "open with funds and limits",
        "POST",
        "/admin/accounts",
        {"name": "x", "credit": "1", "rpm": 5},
        ["create_account", "set_limits", "credit"],
    ),
    ("credit", "POST", "/admin/accounts/{account_id}/credit", {"amount": "1", "memo": "m"}, ["credit"]),
    ("correct", "POST", "/admin/accounts/{account_id}/correct", {"amount": "-0.5", "memo": "m"}, ["correct"]),
    ("take_back", "POST", "/admin/accounts/{account_id}/grants/{grant_id}/take-back", {"memo": "m"}, ["take_back"]),
    ("limits", "PATCH", "/admin/accounts/{account_id}/limits", {"rpm": 5, "weight": 7}, ["set_limits"]),
    ("suspend", "POST", "/admin/accounts/{account_id}/suspend", None, ["set_active"]),
    ("resume", "POST", "/admin/accounts/{account_id}/resume", None, ["set_active"]),
    ("create_key", "POST", "/admin/accounts/{account_id}/keys", {"name": "k"}, ["create_key"]),
    ("update_key", "PATCH", "/admin/keys/{key_id}", {"rpm": 5}, ["update_key"]),
    ("revoke_key", "DELETE", "/admin/keys/{key_id}", None, ["revoke_key"]),
    ("retry_stuck", "POST", "/admin/ledger/stuck/retry", {"ids": ["stuck"]}, ["retry_stuck"]),
]


ELSEWHERE = ("Operator: Models", "Operator: People")  # test_models, test_people


def test_every_endpoint_of_the_operator_that_changes_something_is_in_the_list() -> None:
    changing = {
        (one.method, one.path)
        for one in ENDPOINTS
        if one.path.startswith("/admin") and one.method != "GET" and one.tag not in ELSEWHERE
    }
    assert {(method, path) for _, method, path, _, _ in WRITES} == changing


async def write(
    world: World, admin: httpx.AsyncClient, method: str, path: str, body: Any, **headers: str
) -> httpx.Response:
    """Sends a change to the world's account, which first gets what the change needs."""
    [key] = world.ledger.list_keys(world.account_id)
    grant_id = 0
    if path.endswith("/take-back"):
        world.ledger.credit(world.account_id, NANO, "grant")
        grant_id = world.ledger.grants(world.account_id)[-1].grant_id
    if path.endswith("/resume"):
        world.ledger.set_active(world.account_id, False)
    if path.endswith("/retry"):
        price = Price(1, 1, 1)
        one = Settlement(
            "stuck", world.account_id, key.key_id, "svc-chat", "fake", price, 10, 0, 2, Outcome.COMPLETED, 1.0, 2.0
        )
        world.ledger.keep_stuck([(one, SettlementRejected("stuck", Refusal.FAILED, "unforeseen"))])
    path = path.format(account_id=world.account_id, key_id=key.key_id, grant_id=grant_id)
    return await admin.request(method, path, json=body, headers=headers)


async def log(admin: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await admin.get("/admin/audit", params=params)).json()["data"]
    return found


@pytest.mark.parametrize(("method", "path", "body", "actions"), [w[1:] for w in WRITES], ids=[w[0] for w in WRITES])
async def test_each_write_leaves_a_record_of_who_and_what(
    world: World, admin: httpx.AsyncClient, method: str, path: str, body: Any, actions: list[str]
) -> None:
    headers = {"x-operator": "ada@desk", "x-request-id": "req-of-ada"}
    answer = await write(world, admin, method, path, body, **headers)
    assert answer.is_success, answer.text
    records = await log(admin)
    assert [record["action"] for record in reversed(records)] == actions
    for record in records:
        assert record["actor"] == f"ada@desk {FINGERPRINT}"
        assert record["request_id"] == "req-of-ada"
        assert record["address"]
        assert record["account_id"].startswith("acct_")
    assert world.books_balance()


async def test_a_write_that_was_refused_leaves_none(world: World, admin: httpx.AsyncClient) -> None:
    for name, method, path, body, _ in WRITES:
        world.now += 60.0  # of the clock that wrong keys are counted by
        path = path.replace("{account_id}", "acct_none").replace("{key_id}", "key_none")
        wrong = {**(body or {}), "amount": "-5"} if "acct" not in path and "key_none" not in path else body
        answer = await write(world, admin, method, path, wrong)
        assert answer.status_code in (400, 404, 422), name
        answer = await write(world, admin, method, path, body, authorization="Bearer wrong")
        assert answer.status_code == 401, name
        assert await log(admin) == [], name


async def test_a_write_that_changes_nothing_leaves_none(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}"
    for _ in range(2):
        await admin.patch(f"{path}/limits", json={"rpm": 5})
        await admin.post(f"{path}/suspend")
        await admin.post(f"{path}/credit", json={"amount": "1"}, headers={"idempotency-key": "once"})
    assert [record["action"] for record in await log(admin)] == ["credit", "set_active", "set_limits"]


NAMES = {"credit": "AddCredit", "set_limits": "SetLimits", "update_key": "UpdateKey"}


@pytest.mark.parametrize("lost", ["credit", "set_limits", "update_key"])
async def test_a_write_whose_answer_was_lost_and_is_repeated_leaves_one(
    world: World, admin: httpx.AsyncClient, lost: str
) -> None:
    _, method, path, body, _ = next(one for one in WRITES if one[4] == [lost])
    call, calls = world.accounting.run, 0

    async def once(command: Command[Any]) -> Any:
        nonlocal calls
        calls += type(command).__name__ == NAMES[lost]
        world.accounting.wire_call.lose = {NAMES[lost]} if calls == 1 else set()
        return await call(command)

    world.accounting.run = once  # type: ignore[method-assign]
    assert (await write(world, admin, method, path, body)).is_success
    assert calls == 2
    assert [record["action"] for record in await log(admin)] == [lost]


async def test_a_change_shows_what_was_and_what_is(world: World, admin: httpx.AsyncClient) -> None:
    [key] = world.ledger.list_keys(world.account_id)
    expires_at = "2099-01-01T00:00:00Z"
    body = {"budget": "2.50", "budget_period": "day", "expires_at": expires_at, "models": ["svc-chat"]}
    await admin.patch(f"/admin/keys/{key.key_id}", json=body)
    [record] = await log(admin)
    assert record["subject"] == key.key_id
    assert record["detail"] == {
        "budget": {"was": None, "is": "2.50"},
        "budget_period": {"was": None, "is": "day"},
        "expires_at": {"was": None, "is": expires_at},
        "models": {"was": None, "is": ["svc-chat"]},
    }


async def test_behind_proxies_the_address_is_the_one_from_a_trusted_proxy(
    world: World, admin: httpx.AsyncClient
) -> None:
    world.authenticator.trusted_proxies = 1
    forged = {"x-forwarded-for": "6.6.6.6, 203.0.113.9"}
    await admin.post("/admin/accounts", json={"name": "x"}, headers=forged)
    [record] = await log(admin)
    assert record["address"] == "203.0.113.9"


async def test_an_operator_without_a_name_is_recorded_by_the_keys_fingerprint(
    world: World, admin: httpx.AsyncClient
) -> None:
    await admin.post("/admin/accounts", json={"name": "x"})
    [record] = await log(admin)
    assert record["actor"] == FINGERPRINT
    assert OPERATOR not in json.dumps(record)


async def test_a_malformed_operator_name_changes_nothing(world: World, admin: httpx.AsyncClient) -> None:
    for name in ("x" * 101, "a\tb"):
        refused(
            await admin.post("/admin/accounts", json={"name": "x"}, headers={"x-operator": name}), 422, "x-operator"
        )
    assert len(world.ledger.list_accounts()) == 1
    blank = await admin.post("/admin/accounts", json={"name": "x"}, headers={"x-operator": " "})
    assert (blank.status_code, len(world.ledger.list_accounts())) == (201, 2)


async def test_pages_go_back_to_the_first_record(world: World, admin: httpx.AsyncClient) -> None:
    for number in range(7):
        await admin.post("/admin/accounts", json={"name": f"account {number}"})
    seen: list[str] = []
    after: int | None = None
    while True:
        params = {"limit": 3} | ({} if after is None else {"after": after})
        page = (await admin.get("/admin/audit", params=params)).json()
        seen += [record["detail"]["name"] for record in page["data"]]
        if (after := page["next"]) is None:
            break
    assert seen == [f"account {number}" for number in reversed(range(7))]


async def test_the_log_can_be_of_one_account(world: World, admin: httpx.AsyncClient) -> None:
    await admin.post("/admin/accounts", json={"name": "other"})
    await admin.post(f"/admin/accounts/{world.account_id}/suspend")
    assert [record["action"] for record in await log(admin, account=world.account_id)] == ["set_active"]


async def test_bad_pages_of_the_log_are_422(admin: httpx.AsyncClient) -> None:
    for params in ({"limit": "0"}, {"limit": "501"}, {"after": "x"}, {"after": "-1"}):
        refused(await admin.get("/admin/audit", params=params), 422)


async def test_no_secret_is_in_the_log_or_in_a_log_line(
    world: World, admin: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = (await admin.post(f"/admin/accounts/{world.account_id}/keys", json={"name": "k"})).json()
    await admin.patch(f"/admin/keys/{made['id']}", json={"rpm": 5})
    await admin.get("/admin/usage/export")
    await admin.get("/admin/accounts", headers={"authorization": "Bearer wrong-operator-key"})
    await admin.delete(f"/admin/keys/{made['id']}")
    kept = json.dumps(await log(admin)) + repr(world.ledger.audit_log()) + caplog.text
    assert made["id"] in kept
    for secret in (
        OPERATOR,
        SECRET.decode(),
        made["key"],
        digest(made["key"]),
        world.key,
        "wrong-operator-key",
    ):
        assert secret not in kept
