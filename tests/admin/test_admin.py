"""The operator's endpoints: what each accepts and rejects, and money that is never added twice.

Keys' terms, grants and corrections, exports and the audit log have files of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from serve_app.admin.document import ENDPOINTS
from serve_app.contracts.limiting import PressureReport
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import parse_amount
from serve_app.limiter.admission import Admission
from serve_app.limiter.limiter_service import LimiterService
from tests.accounting.books import settlement
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.world import World, until
from tests.limiter.world import account_snapshot

IDS = {"account_id": "acct_x", "key_id": "key_x", "grant_id": 7, "request_id": "chatcmpl-x", "month": "2026-11"}
IDS |= {"id": "model_x", "name": "backend_x", "invitation_id": "inv_none"}
# By their paths, not by the key that they are declared with: that is what the first test checks.
ROUTES = [
    (endpoint.method, endpoint.path.format(**IDS)) for endpoint in ENDPOINTS if endpoint.path.startswith("/admin")
]
BODIES: dict[str, Any] = {
    "/admin/accounts": {"name": "x"}, "/admin/accounts/acct_x/credit": {"amount": "1"},
    "/admin/accounts/acct_x/limits": {"rpm": 1}, "/admin/accounts/acct_x/correct": {"amount": "-1", "memo": "m"},
    "/admin/accounts/acct_x/grants/7/take-back": {"memo": "m"}, "/admin/keys/key_x": {"rpm": 1},
    "/admin/models/model_x/canary": {"backend": "a", "share": 5}, "/admin/models/model_x/promote": {"backend": "a"},
    "/admin/models/model_x/traffic": {"weights": {}},
    "/admin/accounts/acct_x/people": {"email": "a@example.org", "role": "owner"},
    "/admin/models/model_x/prices": {"input": "1", "cached_input": "1", "output": "1"},
}  # fmt: skip


async def test_only_the_operator_key_opens(world: World, http: httpx.AsyncClient) -> None:
    for method, path in ROUTES:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {world.key}"}):
            world.now += 60.0  # of the clock that wrong keys are counted by
            answer = await http.request(method, path, headers=header, json={"name": "x"})
            assert answer.status_code == 401, (method, path, header)
            refused(answer, 401)
    assert len(world.ledger.list_accounts()) == 1


async def test_what_does_not_exist_is_404(admin: httpx.AsyncClient) -> None:
    for method, path in ROUTES:
        if missing := [name for name in ("acct_x", "key_x", "model_x", "backend_x") if name in path]:
            refused(await admin.request(method, path, json=BODIES.get(path, {})), 404, missing[0])


async def test_an_account_from_its_first_day_to_its_last(world: World, admin: httpx.AsyncClient) -> None:
    made = await admin.post("/admin/accounts", json={"name": "Grace", "credit": "0.5", "kind": "grant", "rpm": 7})
    assert made.status_code == 201
    account = made.json()
    assert (account["balance"], account["granted"], account["topped_up"]) == ("0.50", "0.50", "0.00")
    assert account["limits"] == {"rpm": 7, "tpm": 10**6, "concurrency": 8}
    path = f"/admin/accounts/{account['id']}"
    assert (await admin.post(f"{path}/credit", json={"amount": "1.25"})).json()["balance"] == "1.75"
    changed = await admin.patch(f"{path}/limits", json={"tpm": 5, "rpm": None})
    assert changed.json()["contract"] == {"rpm": None, "tpm": 5, "concurrency": None, "weight": None}
    assert (await admin.patch(f"{path}/limits", json={"tpm": None})).status_code == 200

    key = await admin.post(f"{path}/keys", json={"name": "laptop"})
    assert key.status_code == 201
    assert (await Call(world, key.json()["key"]).done()).status == 200
    [listed] = (await admin.get(f"{path}/keys")).json()["data"]
    assert "key" not in listed
    assert listed["name"] == "laptop"

    shown = (await admin.get(path)).json()
    assert shown["usage"]["requests"] == 1
    rows = (await admin.get("/admin/usage", params={"account": account["id"], "group_by": "model"})).json()["data"]
    assert [(row["model"], row["charged"]) for row in rows] == [("svc-chat", "0.000016")]

    assert (await admin.post(f"{path}/suspend")).json()["status"] == "suspended"
    await world.limiter.service.follow()
    assert (await Call(world, key.json()["key"]).done()).status == 401
    assert (await admin.post(f"{path}/resume")).json()["status"] == "active"
    for _ in range(2):
        assert (await admin.delete(f"/admin/keys/{listed['id']}")).json()["status"] == "revoked"
    await world.limiter.service.follow()
    assert (await Call(world, key.json()["key"]).done()).status == 401
    assert (await admin.get("/admin/ledger/check")).json()["ok"]


BAD: list[tuple[str, bytes, int, str]] = [
    ("", b"{", 400, "JSON"),
    ("", b"[]", 400, ""),
    ("", b"\xff\xfe", 400, ""),
    ("", b"", 400, "name"),
    ("", b'{"name": 5}', 400, "name"),
    ("", b'{"name": "x", "nmae": 1}', 400, "nmae"),
    ("", b'{"name": ""}', 422, "name"),
    ("", b'{"name": "line\\nbreak"}', 422, "printable"),
    ("", b'{"name": "x", "rpm": 0}', 422, "rpm"),
    ("", b'{"name": "x", "rpm": 1.5}', 400, "rpm"),
    ("", b'{"name": "x", "rpm": true}', 400, "rpm"),
    ("", b'{"name": "x", "kind": "gift"}', 422, "kind"),
    ("", b'{"name": "x", "weight": 0}', 422, "weight"),
    ("", b'{"name": "x", "weight": 1000001}', 422, "weight"),
    ("", b'{"name": "x", "expires_at": "2099-01-01T00:00:00Z"}', 422, "expires_at"),
    ("", b'{"name": "x", "credit": "1", "expires_at": "2099-01-01T00:00:00Z"}', 422, "only grants expire"),
    ("", b'{"name": "x", "credit": "1", "kind": "grant", "expires_at": "2020-01-01T00:00:00Z"}', 422, "passed"),
    ("", b'{"name": "x", "credit": "1", "kind": "grant", "expires_at": "2099-01-01T00:00:00"}', 422, "offset"),
    ("", b'{"name": "x", "credit": "1", "kind": "grant", "expires_at": 5}', 400, "expires_at"),
    ("", b'{"name": "x", "credit": "-1"}', 422, "negative"),
    ("", b'{"name": "x", "credit": "0"}', 422, "above 0"),
    ("", b'{"name": "x", "credit": 1}', 400, "credit"),
    ("", b'{"name": "x", "credit": "1e99"}', 422, ""),
    ("", b'{"name": "x", "credit": "0.0000000001"}', 422, "9 decimals"),
    ("/ID/credit", b'{"amount": "-1"}', 422, "negative"),
    ("/ID/credit", b'{"amount": "0.00"}', 422, "above 0"),
    ("/ID/credit", b'{"amount": "NaN"}', 422, "decimal"),
    ("/ID/credit", b'{"amount": 5}', 400, "amount"),
    ("/ID/credit", b"{}", 400, "amount"),
    ("/ID/credit", b'{"amount": "1", "expires_at": "2099-01-01T00:00:00Z"}', 422, "top-up"),
    ("/ID/credit", b'{"amount": "1", "kind": "grant", "expires_at": "soon"}', 422, "expires_at"),
    ("/ID/correct", b'{"amount": "1"}', 400, "memo"),
    ("/ID/correct", b'{"amount": "1", "memo": ""}', 422, "memo"),
    ("/ID/correct", b'{"amount": "0", "memo": "m"}', 422, "amount"),
    ("/ID/correct", b'{"amount": "-2", "memo": "m"}', 422, "1.00"),
    ("/ID/keys", b'{"name": ""}', 422, "name"),
    ("/ID/keys", b'{"models": []}', 422, "models"),
    ("/ID/keys", b'{"models": ["svc-chta"]}', 422, "svc-chat, svc-coder"),
    ("/ID/keys", b'{"rpm": 0}', 422, "rpm"),
    ("/ID/keys", b'{"budget": "1"}', 422, "budget_period"),
    ("/ID/keys", b'{"budget_period": "day"}', 422, "budget"),
    ("/ID/keys", b'{"budget": "1", "budget_period": "week"}', 422, "budget_period"),
    ("/ID/keys", b'{"budget": "0", "budget_period": "day"}', 422, "budget must be above 0"),
    ("/ID/keys", b'{"budget": 1, "budget_period": "day"}', 400, "budget"),
    ("/ID/keys", b'{"expires_at": "2020-01-01T00:00:00Z"}', 422, "expires_at"),
    ("/ID/keys", b'{"expires_at": "2099-01-01"}', 422, "expires_at"),
]


async def test_bad_bodies_change_nothing(world: World, admin: httpx.AsyncClient) -> None:
    before = world.balance
    for path, body, status, says in BAD:
        answer = await admin.post("/admin/accounts" + path.replace("ID", world.account_id), content=body)
        assert answer.status_code == status, (path, body, answer.text)
        refused(answer, status, says)
    assert len(world.ledger.list_accounts()) == 1
    assert len(world.ledger.list_keys(world.account_id)) == 1
    assert world.balance == before
    assert world.ledger.audit_log() == []


async def test_a_body_over_the_limit_is_400(admin: httpx.AsyncClient) -> None:
    refused(await admin.post("/admin/accounts", content=b'{"name": "' + b"x" * 70_000 + b'"}'), 400, "larger")


async def test_bad_pages_are_422(admin: httpx.AsyncClient) -> None:
    for limit in ("0", "-1", "x", "²", "501", "9" * 5000, ""):
        refused(await admin.get("/admin/accounts", params={"limit": limit}), 422, "limit")


async def test_pages_list_each_account_once(world: World, admin: httpx.AsyncClient) -> None:
    for _ in range(4):
        world.new_account(credit=0)
    seen: list[str] = []
    after = None
    while True:
        params = {"limit": "2", **({"after": after} if after else {})}
        page = (await admin.get("/admin/accounts", params=params)).json()
        seen += [account["id"] for account in page["data"]]
        if (after := page["next"]) is None:
            break
    assert len(seen) == len(set(seen)) == 5
    assert len((await admin.get("/admin/accounts", params={"limit": "500"})).json()["data"]) == 5
    refused(await admin.get("/admin/accounts", params={"after": "acct_none"}), 404)


async def test_a_credit_with_the_same_idempotency_key_is_added_once(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}/credit"
    for _ in range(3):
        answer = await admin.post(path, json={"amount": "2"}, headers={"idempotency-key": "top-up-7"})
        assert answer.json()["balance"] == "3.00"
    refused(await admin.post(path, json={"amount": "3"}, headers={"idempotency-key": "top-up-7"}), 422, "top-up-7")
    assert (await admin.post(path, json={"amount": "2"})).json()["balance"] == "5.00"
    made = [
        (await admin.post("/admin/accounts", json={"name": "n", "credit": "1"}, headers={"idempotency-key": "new"}))
        for _ in range(2)
    ]
    assert made[0].json()["id"] == made[1].json()["id"]
    assert made[1].json()["balance"] == "1.00"


@pytest.mark.parametrize("lost", ["OpenAccount", "CreateKey"])
async def test_a_change_whose_answer_was_lost_is_made_once(world: World, admin: httpx.AsyncClient, lost: str) -> None:
    world.accounting.wire_call.lose.add(lost)
    asked = asyncio.create_task(admin.post("/admin/accounts", json={"name": "once", "credit": "1"}))
    if lost == "CreateKey":
        answer = await asked
        asked = asyncio.create_task(admin.post(f"/admin/accounts/{answer.json()['id']}/keys", json={"name": "k"}))
    await world.accounting.wire_call.seen(lost).wait()
    await until(lambda: len(world.ledger.list_accounts()) == 2)
    world.accounting.wire_call.up()
    answer = await asked
    assert answer.status_code == 201
    [account] = world.ledger.list_accounts()[1:]
    assert account.balance == 10**9
    assert len(world.ledger.list_keys(account.account_id)) == (1 if lost == "CreateKey" else 0)


async def test_an_idempotency_key_that_is_too_long_creates_no_account(world: World, admin: httpx.AsyncClient) -> None:
    body, headers = {"name": "x", "credit": "1"}, {"idempotency-key": "x" * 129}
    refused(await admin.post("/admin/accounts", json=body, headers=headers), 422, "idempotency-key")
    assert len(world.ledger.list_accounts()) == 1


async def test_a_weight_is_the_accounts_own_or_the_services(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}"
    assert (await admin.get(path)).json()["weight"] == 100
    changed = (await admin.patch(f"{path}/limits", json={"weight": 250})).json()
    assert (changed["weight"], changed["contract"]["weight"]) == (250, 250)
    assert world.ledger.get_account(world.account_id).limits["weight"] == 250
    changed = (await admin.patch(f"{path}/limits", json={"weight": None})).json()
    assert (changed["weight"], changed["contract"]["weight"]) == (100, None)
    made = await admin.post("/admin/accounts", json={"name": "heavy", "weight": 400})
    assert made.json()["weight"] == 400


async def test_an_account_shows_its_limits_and_what_is_in_force(world: World, admin: httpx.AsyncClient) -> None:
    path = f"/admin/accounts/{world.account_id}"
    await admin.patch(f"{path}/limits", json={"rpm": 7})
    await Call(world).done()  # now the limiter knows the account
    shown = (await admin.get(path)).json()
    assert shown["limits"] == shown["effective"] == {"rpm": 7, "tpm": 10**6, "concurrency": 8}
    assert shown["pressure"] == []


async def test_under_pressure_an_account_shows_what_is_left_of_its_limits(
    world: World, admin: httpx.AsyncClient
) -> None:
    path, now = f"/admin/accounts/{world.account_id}", 0.0
    contract = Contract(rpm=1000, tpm=600_000, concurrency=8)
    admission = Admission(lambda: now, random.Random(7), contract, recovery_s=0.0)
    world.limiter.service = LimiterService(admission, world.accounting)
    for _ in range(60):
        now += 0.5
        await world.limiter.ask([PressureReport("fake", "replica", 3.0, 0.5, 0, 10, 32)])
    left = []
    for weight in (50, 200):
        await admin.patch(f"{path}/limits", json={"weight": weight})
        account = world.ledger.get_account(world.account_id)
        admission.apply(account_snapshot(account.account_id, 0, account.version, weight=weight))
        shown = (await admin.get(path)).json()
        assert shown["limits"] == {"rpm": 1000, "tpm": 600_000, "concurrency": 8}
        left.append(shown["effective"]["tpm"])
        assert left[-1] == round(60 * admission.shares.rate("fake", replace(contract, weight=weight), now))
        assert shown["pressure"] == [{"backend": "fake", "tpm": left[-1]}]
    light, heavy = left
    assert 0 < light <= heavy < 600_000


async def test_with_the_ledger_away_operators_get_503(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.patience_s = 0.1
    world.accounting.wire_call.down()
    refused(await admin.get(f"/admin/accounts/{world.account_id}"), 503, "ledger")


async def test_a_ledger_that_hangs_does_not_hang_the_operator(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.patience_s = 0.1
    world.accounting.wire_call.hold["*"] = asyncio.Event()
    refused(await admin.get(f"/admin/accounts/{world.account_id}"), 503, "ledger")


async def test_models_show_prices_backends_and_what_is_missing(world: World, admin: httpx.AsyncClient) -> None:
    [chat, _] = (await admin.get("/admin/models")).json()["data"]
    shown = {"name": "fake", "weight": 100, "status": "RUNNING", "replicas": 1}
    assert chat["backends"] == [shown | {"share": 1.0, "healthy": True, "ejected": False}]
    assert (chat["source"], chat["traffic"], chat["rollback"]) == ("config.yaml", None, None)
    assert chat["price"] == {"input": "1", "cached_input": "0.5", "output": "3"}
    world.backends.report = {}
    [chat, _] = (await admin.get("/admin/models")).json()["data"]
    assert (chat["backends"][0]["status"], chat["backends"][0]["healthy"]) == ("MISSING", False)
    world.backends.report = None
    refused(await admin.get("/admin/models"), 503)


async def test_balance_and_usage_of_an_account_are_of_one_moment(
    world: World, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = world.ledger.get_account(world.account_id).balance
    [key] = world.ledger.list_keys(world.account_id)
    settled = itertools.count()
    run = world.ledger.run

    def settle_after(command: Any) -> Any:
        answer = run(command)
        world.ledger.settle([settlement(f"between-{next(settled)}", world.account_id, key.key_id)])
        return answer

    monkeypatch.setattr(world.ledger, "run", settle_after)
    shown = (await admin.get(f"/admin/accounts/{world.account_id}")).json()
    assert next(settled) > 1
    assert parse_amount(shown["balance"]) + parse_amount(shown["usage"]["charged"]) == opening


async def test_a_full_check_of_the_books_can_be_asked_for(admin: httpx.AsyncClient) -> None:
    for full in ("true", "false"):
        assert (await admin.get("/admin/ledger/check", params={"full": full})).json()["ok"] is True
    refused(await admin.get("/admin/ledger/check", params={"full": "maybe"}), 422, "full")


async def test_usage_refuses_what_it_cannot_group_by(admin: httpx.AsyncClient) -> None:
    refused(await admin.get("/admin/usage", params={"group_by": "moon"}), 422, "moon")
    refused(await admin.get("/admin/usage", params={"from": "2026-13-01"}), 422, "YYYY-MM-DD")
    refused(await admin.get("/admin/usage", params={"from": "2026-13-01", "to": "2026-01-01"}), 422, "YYYY-MM-DD")


async def test_a_nul_in_a_query_finds_nothing_on_any_database(admin: httpx.AsyncClient) -> None:
    for path, status in {
        "/admin/accounts/%00": 404,
        "/admin/accounts/a%00b/keys": 404,
        "/admin/accounts/%00/grants": 404,
        "/admin/accounts?after=%00": 404,
        "/admin/usage?account=%00&key=%00&model=%00": 200,
        "/admin/usage/requests?account=%00": 200,
        "/admin/usage/export?model=%00": 200,
        "/admin/usage/requests?after=%00": 422,
        "/admin/audit?account=%00": 200,
    }.items():
        assert (await admin.get(path)).status_code == status, path
