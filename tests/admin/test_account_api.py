"""`/account`: what the console does, with a management key of the account, and with no other key."""

from __future__ import annotations

import base64
import dataclasses
import logging
import re
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.admin import own_account
from serve_app.admin.auditing import FailedLogins
from serve_app.admin.document import ENDPOINTS
from serve_app.admin.management_keys import MAX_REMEMBERED, REMEMBERED_S
from serve_app.contracts.key_format import MANAGEMENT, digest, hint, new_key, well_formed
from serve_app.contracts.management import CreateManagementKey, ManagementKey, RevokeManagementKey
from serve_app.contracts.notices import CreateAlert, ListAlerts
from serve_app.gateway.query_rates import QueryRates
from tests.accounting.books import settlement
from tests.gateway.answers import refused
from tests.gateway.connections import Call
from tests.gateway.world import OPERATOR, World

OWN = [one for one in ENDPOINTS if one.path.startswith("/account")]
IDS = [f"{one.method} {one.path}" for one in OWN]
WEBHOOK = "https://hooks.example.org/x"
DAY_S = 86_400.0
#: What each endpoint is sent, and the actions that it leaves on the audit log. A new endpoint needs a row.
SENT: dict[str, tuple[dict[str, Any] | None, list[str]]] = {
    "GET /account": (None, []),
    "GET /account/usage": (None, []),
    "GET /account/requests": (None, []),
    "GET /account/requests/{request_id}": (None, []),
    "GET /account/keys": (None, []),
    "POST /account/keys": ({"name": "ci"}, ["create_key"]),
    "GET /account/keys/{key_id}": (None, []),
    "PATCH /account/keys/{key_id}": ({"rpm": 5}, ["update_key"]),
    "DELETE /account/keys/{key_id}": (None, ["revoke_key"]),
    "POST /account/keys/{key_id}/rotate": ({"overlap_hours": 1}, ["create_key", "update_key"]),
    "GET /account/alerts": (None, []),
    "POST /account/alerts": ({"kind": "day", "threshold": "1", "target": WEBHOOK}, ["create_alert"]),
    "DELETE /account/alerts/{alert_id}": (None, ["remove_alert"]),
}


def manage(world: World, account_id: str = "", **terms: Any) -> tuple[str, ManagementKey]:
    key = new_key(MANAGEMENT)
    wanted = CreateManagementKey(account_id or world.account_id, "robot", digest(key), hint(key), **terms)
    return key, world.ledger.run(wanted)


def things(world: World, account_id: str) -> dict[str, str]:
    """An id of each kind that the account has."""
    [key, *_] = world.ledger.list_keys(account_id)
    request_id = f"chatcmpl-{account_id}"
    world.ledger.settle([settlement(request_id, account_id, key.key_id)])
    alert = world.ledger.run(CreateAlert(account_id, "month", 5, WEBHOOK, ""))
    return {"key_id": key.key_id, "request_id": request_id, "alert_id": alert.alert_id}


def audited(world: World) -> list[str]:
    return [record.action for record in reversed(world.ledger.audit_log())]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a name server."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 443))]
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: found if "example" in str(host) else real(host, *more, **named),
    )


@pytest.fixture
def robot(world: World, http: httpx.AsyncClient) -> httpx.AsyncClient:
    """With a management key of the world's account."""
    http.headers["authorization"] = f"Bearer {manage(world)[0]}"
    return http


async def send(http: httpx.AsyncClient, route: str, ids: dict[str, str], **headers: str) -> httpx.Response:
    method, path = route.split()
    return await http.request(method, path.format(**ids), json=SENT[route][0], headers=headers)


def test_the_table_has_every_endpoint_and_no_other_path_takes_a_management_key() -> None:
    assert set(SENT) == set(IDS)
    for one in ENDPOINTS:
        assert (one.key == "managementKey") == one.path.startswith("/account"), one.path
        assert one.tag == own_account.TAG or one.key != "managementKey"


async def test_each_endpoint_does_what_it_says_and_leaves_its_records(world: World, robot: httpx.AsyncClient) -> None:
    for route, one in zip(IDS, OWN, strict=True):
        account_id, _ = world.new_account()
        key, made = manage(world, account_id)
        ids = things(world, account_id)
        headers = {"authorization": f"Bearer {key}", "x-request-id": "of-robot", "x-operator": "somebody"}
        answer = await send(robot, route, ids, **headers)
        assert answer.status_code == one.status, (route, answer.text)
        records = [record for record in reversed(world.ledger.audit_log()) if record.account_id == account_id]
        assert [record.action for record in records] == SENT[route][1], route
        for record in records:
            assert (record.actor, record.request_id) == (f"mk:{made.key_id}", "of-robot"), route
            assert record.address, route
    assert world.books_balance()


WRONG: dict[str, Callable[[World], str]] = {
    "no key": lambda world: "",
    "another scheme": lambda world: "Basic eDp5",
    "a word": lambda world: "Bearer wrong",
    "a key with a typo": lambda world: f"Bearer {manage(world)[0][:-1]}!",
    "a well-formed key that nobody has": lambda world: f"Bearer {new_key(MANAGEMENT)}",
    "an API key": lambda world: f"Bearer {world.key}",
    "an API key with the other prefix": lambda world: f"Bearer mk-{world.key[3:]}",
    "the operator key": lambda world: f"Bearer {OPERATOR}",
    "a revoked key": lambda world: f"Bearer {revoked(world)}",
    "an expired key": lambda world: f"Bearer {expired(world)}",
    "a key of a suspended account": lambda world: f"Bearer {suspended(world)}",
}


def revoked(world: World) -> str:
    key, made = manage(world)
    world.ledger.run(RevokeManagementKey(world.account_id, made.key_id))
    return key


def expired(world: World) -> str:
    at = world.admin.now() + 60
    key, _ = manage(world, expires_at=at)
    world.admin.now = lambda: at
    return key


def suspended(world: World) -> str:
    key, _ = manage(world)
    world.ledger.set_active(world.account_id, False)
    return key


@pytest.mark.parametrize("who", WRONG)
async def test_no_endpoint_opens_to_another_key(world: World, http: httpx.AsyncClient, who: str) -> None:
    ids = things(world, world.account_id)
    authorization = WRONG[who](world)
    before = (world.ledger.list_keys(world.account_id), world.ledger.run(ListAlerts(world.account_id)))
    for route in IDS:
        world.now += 60.0  # of the clock that wrong keys are counted by
        answer = await send(http, route, ids, **({"authorization": authorization} if authorization else {}))
        refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer", route
    assert (world.ledger.list_keys(world.account_id), world.ledger.run(ListAlerts(world.account_id))) == before
    assert audited(world) == []


@pytest.mark.parametrize("route", [one for one in IDS if "{" in one])
async def test_what_another_account_has_is_as_what_nobody_has(
    world: World, robot: httpx.AsyncClient, route: str
) -> None:
    other, _ = world.new_account()
    theirs = things(world, other)
    before = (world.ledger.list_keys(other), world.ledger.run(ListAlerts(other)))
    seen = []
    for ids in (theirs, {name: f"{value[:-1]}~" for name, value in theirs.items()}):
        answer = await send(robot, route, ids)
        assert answer.status_code == 404, answer.text
        message = answer.json()["error"]["message"]
        for value in ids.values():
            message = message.replace(value, "ID")
        seen.append(message)
    assert seen[0] == seen[1]
    assert other not in str(seen)
    assert (world.ledger.list_keys(other), world.ledger.run(ListAlerts(other))) == before
    assert audited(world) == []


async def test_lists_and_sums_are_of_the_own_account_alone(world: World, robot: httpx.AsyncClient) -> None:
    other, _ = world.new_account()
    mine, theirs = things(world, world.account_id), things(world, other)
    shown = (await robot.get("/account")).json()
    assert (shown["id"], shown["currency"], shown["balance"]) == (world.account_id, "USD", "0.999999954")
    assert shown["limits"] == shown["effective"] == {"rpm": 1000, "tpm": 10**6, "concurrency": 8}
    assert [key["id"] for key in (await robot.get("/account/keys")).json()["data"]] == [mine["key_id"]]
    assert [one["id"] for one in (await robot.get("/account/alerts")).json()["data"]] == [mine["alert_id"]]
    [row] = (await robot.get("/account/requests")).json()["data"]
    assert (row["request_id"], row["account_id"]) == (mine["request_id"], world.account_id)
    assert (await robot.get(f"/account/requests/{mine['request_id']}")).json() == row
    for group in ("day", "model", "key", "day,model,key"):
        [sums] = (await robot.get("/account/usage", params={"group_by": group})).json()["data"]
        assert (sums["requests"], sums["charged"]) == (1, row["charged"])
    for path in ("usage", "requests"):
        assert (await robot.get(f"/account/{path}", params={"key": theirs["key_id"]})).json()["data"] == []
        assert len((await robot.get(f"/account/{path}", params={"key": mine["key_id"]})).json()["data"]) == 1
        assert (await robot.get(f"/account/{path}", params={"account": other})).json() == (
            await robot.get(f"/account/{path}")
        ).json()


async def test_sums_and_requests_by_tag_follow_the_keys_tags(world: World, robot: httpx.AsyncClient) -> None:
    ids = [(await robot.post("/account/keys", json={"tags": tags})).json()["id"] for tags in (["a", "b"], ["b"], None)]
    for number, key_id in enumerate([*ids, ids[0]]):
        world.ledger.settle([settlement(f"r{number}", world.account_id, key_id)])

    async def sums(**query: str) -> dict[str, int]:
        rows = (await robot.get("/account/usage", params=query)).json()["data"]
        return {row.get("tag", "all"): row["requests"] for row in rows}

    assert await sums(group_by="tag") == {"": 1, "a": 2, "b": 3}
    assert await sums(tag="b", group_by="model") == {"all": 3}
    assert await sums(tag="", group_by="model") == {"all": 1}
    assert await sums(group_by="tag", tag="a", key=ids[0]) == {"a": 2, "b": 2}
    listed = (await robot.get("/account/requests", params={"tag": "a"})).json()["data"]
    assert [row["key_id"] for row in listed] == [ids[0]] * 2
    await robot.patch(f"/account/keys/{ids[0]}", json={"tags": None})
    assert await sums(group_by="tag") == {"": 3, "b": 1}


async def test_requests_come_page_by_page(world: World, robot: httpx.AsyncClient) -> None:
    [key] = world.ledger.list_keys(world.account_id)
    world.ledger.settle([settlement(f"r{number}", world.account_id, key.key_id) for number in range(5)])
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await robot.get("/account/requests", params={"limit": "2", **after})).json()
        seen += [row["request_id"] for row in page["data"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == [f"r{number}" for number in range(5)]
    refused(await robot.get("/account/requests", params={"from": "2026-11-02", "to": "2026-11-01"}), 422, "from")
    refused(await robot.get("/account/usage", params={"from": "2026-11-02", "to": "2026-11-01"}), 422, "swap them")


async def test_a_key_that_is_made_chats_and_is_shown_once(
    world: World, robot: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    terms = {"name": "ci", "models": ["svc-chat"], "rpm": 3, "budget": "2.50", "budget_period": "day"}
    made = (await robot.post("/account/keys", json=terms)).json()
    assert (await Call(world, made["key"]).done()).status == 200
    key = made.pop("key")
    shown = (await robot.get(f"/account/keys/{made['id']}")).json()
    assert {name: shown[name] for name in shown if name != "spent"} == {
        name: made[name] for name in made if name != "spent"
    }
    rotated = (await robot.post(f"/account/keys/{made['id']}/rotate", json={})).json()
    await robot.get("/account/keys/none")
    for secret in (key, rotated["key"], digest(key), robot.headers["authorization"].split()[1]):
        assert secret not in (await robot.get("/account/keys")).text
        assert secret not in caplog.text
        assert secret not in repr([dataclasses.asdict(one) for one in world.ledger.audit_log()])


@pytest.mark.parametrize(("hours", "ends_in"), [(168, 7 * DAY_S), (0, None)])
async def test_a_key_is_rotated_as_on_the_console(
    world: World, robot: httpx.AsyncClient, hours: int, ends_in: float | None
) -> None:
    now = float(int(world.admin.now()))
    world.admin.now = lambda: now
    terms = {"name": "ci", "models": ["svc-chat"], "rpm": 3, "budget": "2.50", "budget_period": "day"}
    terms |= {"tags": ["ci", "lab"], "addresses": ["10.0.0.0/8", "2001:db8::/48"]}
    old = (await robot.post("/account/keys", json=terms)).json()
    answer = await robot.post(f"/account/keys/{old['id']}/rotate", json={"overlap_hours": hours})
    new = answer.json()
    assert (answer.status_code, new["id"] != old["id"], new["key"] != old["key"]) == (201, True, True)
    assert {name: new[name] for name in ("tags", "addresses")} == {name: terms[name] for name in ("tags", "addresses")}
    for name in ("name", "models", "limits", "budget", "budget_period", "expires_at", "status", "tags", "addresses"):
        assert new[name] == old[name], name
    [ended] = [one for one in world.ledger.list_keys(world.account_id) if one.key_id == old["id"]]
    assert (ended.active, ended.expires_at) == ((False, None) if ends_in is None else (True, now + ends_in))
    if ends_in is None:
        refused(await robot.post(f"/account/keys/{old['id']}/rotate", json={}), 422, "revoked")
    refused(await robot.post(f"/account/keys/{new['id']}/rotate", json={"overlap_hours": 169}), 422, "overlap_hours")


@pytest.mark.parametrize("hours", [0, 1])
async def test_a_change_under_one_idempotency_key_happens_once(
    world: World, robot: httpx.AsyncClient, hours: int
) -> None:
    once = {"idempotency-key": "deploy-7"}
    first, again = [(await robot.post("/account/keys", json={"name": "ci"}, headers=once)).json() for _ in range(2)]
    assert first == again
    assert well_formed(first["key"])
    path = f"/account/keys/{first['id']}/rotate"
    body = {"overlap_hours": hours}
    rotated = [(await robot.post(path, json=body, headers=once)).json() for _ in range(2)]
    assert rotated[0] == rotated[1]
    alerts = [
        (await robot.post("/account/alerts", json=SENT["POST /account/alerts"][0], headers=once)).json()
        for _ in range(2)
    ]
    assert alerts[0] == alerts[1]
    assert audited(world) == ["create_key", "create_key", "update_key" if hours else "revoke_key", "create_alert"]
    assert len(world.ledger.list_keys(world.account_id)) == 3
    other, other_key = world.new_account()
    key, _ = manage(world, other)
    theirs = await robot.post("/account/keys", json={"name": "ci"}, headers={**once, "authorization": f"Bearer {key}"})
    assert (theirs.status_code, theirs.json()["account_id"]) == (201, other)
    assert theirs.json()["key"] not in (first["key"], other_key)
    refused(await robot.post("/account/keys", json={"name": "other"}, headers=once), 422)
    refused(await robot.post("/account/keys", json={}, headers={"idempotency-key": " "}), 422, "idempotency-key")


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("POST /account/keys", {"models": ["gpt"]}, 422, "models"),
    ("POST /account/keys", {"rpm": 0}, 422, "rpm"),
    ("POST /account/keys", {"addresses": ["10.0.0.5/8"]}, 422, "write 10.0.0.0/8"),
    ("PATCH /account/keys/{key_id}", {"tags": ["a,b"]}, 422, "no comma"),
    ("POST /account/keys", {"account_id": "acct_other"}, 400, "account_id"),
    ("PATCH /account/keys/{key_id}", {"budget": "-1"}, 422, "budget"),
    ("POST /account/alerts", {"kind": "no"}, 422, "kind"),
    ("POST /account/alerts", {"threshold": "0"}, 422, "threshold"),
    ("POST /account/alerts", {"target": "https://127.0.0.1/"}, 422, "target"),
    ("POST /account/alerts", {"target": "http://hooks.example.org/"}, 422, "target"),
    ("POST /account/alerts", {"target": "ada@example.org"}, 422, "e-mail"),
]


async def test_a_bad_change_changes_nothing(world: World, robot: httpx.AsyncClient) -> None:
    ids = things(world, world.account_id)
    for route, body, status, says in BAD:
        method, path = route.split()
        sent = (SENT[route][0] or {}) | body
        refused(await robot.request(method, path.format(**ids), json=sent), status, says)
    assert audited(world) == []


async def test_a_webhooks_secret_is_shown_once(world: World, robot: httpx.AsyncClient) -> None:
    made = (await robot.post("/account/alerts", json=SENT["POST /account/alerts"][0])).json()
    secret = made.pop("secret")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert (await robot.get("/account/alerts")).json()["data"] == [made]
    removed = await robot.delete(f"/account/alerts/{made['id']}")
    assert (removed.status_code, removed.json()) == (200, made)
    assert secret not in removed.text + repr(world.ledger.audit_log())
    world.admin.alert_mail = True
    by_mail = {"kind": "balance", "threshold": "2.50", "target": "ada@example.org"}
    assert (await robot.post("/account/alerts", json=by_mail)).json()["secret"] is None


async def test_a_management_key_opens_no_chat_and_nothing_of_the_operator(
    world: World, robot: httpx.AsyncClient
) -> None:
    chat = await Call(world, robot.headers["authorization"].split()[1]).done()
    assert chat.status == 401
    assert b"/account only" in chat.body
    for one in ENDPOINTS:
        if one.key in ("apiKey", "operatorKey"):
            ids = dict.fromkeys(re.findall(r"{(\w+)}", one.path), "x")
            world.now += 60.0  # of the clock that wrong keys are counted by
            answer = await robot.request(one.method, one.path.format(**ids), json={})
            assert answer.status_code == 401, one.path


@pytest.mark.parametrize("end", ["revoked", "suspended"])
async def test_the_end_of_a_key_takes_effect_within_seconds(world: World, robot: httpx.AsyncClient, end: str) -> None:
    clock = 0.0
    world.admin.management.clock = lambda: clock
    key, made = manage(world)
    robot.headers["authorization"] = f"Bearer {key}"
    assert (await robot.get("/account/keys")).status_code == 200
    asked = len(world.accounting.called)
    clock = REMEMBERED_S - 0.1
    assert (await robot.get("/account/keys")).status_code == 200
    assert len(world.accounting.called) == asked + 1, "the key was remembered"
    if end == "revoked":
        world.ledger.run(RevokeManagementKey(world.account_id, made.key_id))
    else:
        world.ledger.set_active(world.account_id, False)
    clock = REMEMBERED_S
    refused(await robot.get("/account/keys"), 401, end)
    world.ledger.set_active(world.account_id, True)
    assert (await robot.get("/account/keys")).status_code == (401 if end == "revoked" else 200)


async def test_a_key_expires_also_while_it_is_remembered(world: World, robot: httpx.AsyncClient) -> None:
    at = world.admin.now() + 60
    key, _ = manage(world, expires_at=at)
    robot.headers["authorization"] = f"Bearer {key}"
    assert (await robot.get("/account")).status_code == 200
    world.admin.now = lambda: at
    refused(await robot.get("/account"), 401, "expired")


async def test_wrong_keys_are_slowed_down_and_a_right_one_is_not(world: World, robot: httpx.AsyncClient) -> None:
    guesses = [
        (await robot.get("/account", headers={"authorization": f"Bearer {new_key(MANAGEMENT)}"})).status_code
        for _ in range(25)
    ]
    assert guesses == [401] * 20 + [429] * 5
    assert (await robot.get("/account")).status_code == 200
    wrong = {"authorization": f"Bearer {new_key(MANAGEMENT)}"}
    world.now += 60.0
    asked = len(world.accounting.called)
    assert [(await robot.get("/account", headers=wrong)).status_code for _ in range(3)] == [401] * 3
    assert len(world.accounting.called) == asked + 1, "a wrong key is looked up once"


async def test_wrong_keys_are_on_the_audit_log(world: World, robot: httpx.AsyncClient) -> None:
    counted: list[str] = []
    failed = FailedLogins(world.admin.accounting)
    failed.count = counted.append  # type: ignore[method-assign]
    world.admin.failed_logins = failed
    await robot.get("/account")
    await robot.get("/account", headers={"authorization": ""})
    assert counted == []
    await robot.get("/account", headers={"authorization": f"Bearer {world.key}"})
    assert len(counted) == 1


async def test_a_management_key_has_a_rate_of_its_own(world: World, robot: httpx.AsyncClient) -> None:
    world.admin.queries = QueryRates(2, lambda: 0.0)
    assert [(await robot.get("/account")).status_code for _ in range(3)] == [200, 200, 429]
    other, _ = manage(world)
    answer = await robot.get("/account", headers={"authorization": f"Bearer {other}"})
    assert answer.status_code == 200


async def test_what_is_remembered_is_bounded(world: World, robot: httpx.AsyncClient) -> None:
    management = world.admin.management
    assert (await robot.get("/account")).status_code == 200
    [entry] = management._remembered.values()
    management._remembered.update((f"digest {number}", entry) for number in range(MAX_REMEMBERED))
    robot.headers["authorization"] = f"Bearer {manage(world)[0]}"
    assert (await robot.get("/account")).status_code == 200
    assert len(management._remembered) == MAX_REMEMBERED
